"""Predict clicks of users on ads with one Paddle process: what cluster.py starts from."""

import numpy as np
import paddle
from paddle import nn

USERS, ADS, BATCH, STEPS = 5_000, 500, 512, 1_000


class ClickModel(nn.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, 8, sparse=True)
        self.ads = nn.Embedding(ADS, 8, sparse=True)
        self.network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: paddle.Tensor, ads: paddle.Tensor) -> paddle.Tensor:
        return self.network(paddle.concat([self.users(users), self.ads(ads)], axis=1)).squeeze(1)


world = np.random.default_rng(0)
taste, appeal = world.normal(size=USERS), world.normal(size=ADS)
visits = np.random.default_rng(1)

paddle.seed(0)
model = ClickModel()
optimizer = paddle.optimizer.Adam(0.01, parameters=model.parameters(), lazy_mode=True)

losses = []
for _ in range(STEPS):
    users = visits.integers(0, USERS, BATCH)
    ads = visits.integers(0, ADS, BATCH)
    chance = 1 / (1 + np.exp(-2 * (taste[users] + appeal[ads])))
    clicks = (visits.random(BATCH) < chance).astype("float32")
    logits = model(paddle.to_tensor(users), paddle.to_tensor(ads))
    loss = nn.functional.binary_cross_entropy_with_logits(logits, paddle.to_tensor(clicks))
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))

print(f"mean loss of the last 20 steps: {np.mean(losses[-20:]):.4f}")
