"""Predict clicks of users on ads with one PyTorch process: what cluster_torch.py starts from."""

import numpy as np
import torch
from torch import nn

USERS, ADS, BATCH, STEPS = 5_000, 500, 512, 1_000


class ClickModel(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, 8)
        self.ads = nn.Embedding(ADS, 8)
        self.network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: torch.Tensor, ads: torch.Tensor) -> torch.Tensor:
        return self.network(torch.cat([self.users(users), self.ads(ads)], dim=1)).squeeze(1)


world = np.random.default_rng(0)
taste, appeal = world.normal(size=USERS), world.normal(size=ADS)
visits = np.random.default_rng(1)

torch.manual_seed(0)
model = ClickModel()
optimizer = torch.optim.Adagrad(model.parameters(), 0.1)

losses = []
for _ in range(STEPS):
    users = visits.integers(0, USERS, BATCH)
    ads = visits.integers(0, ADS, BATCH)
    chance = 1 / (1 + np.exp(-2 * (taste[users] + appeal[ads])))
    clicks = (visits.random(BATCH) < chance).astype("float32")
    logits = model(torch.from_numpy(users), torch.from_numpy(ads))
    loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(clicks))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

print(f"mean loss of the last 20 steps: {np.mean(losses[-20:]):.4f}")
