//! What can happen next.

use super::*;

impl World {
    /// Everything that can happen next.
    pub fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        let alive = |node: usize| self.nodes[node].is_some();
        for (at, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            for queue in node.apply_queues() {
                steps.push(Step::Do(at, queue));
            }
            let wanted = node.replica.wanted_links();
            for (to, link) in self.links[at].iter().enumerate() {
                self.arrivals(at, to, &mut steps);
                if !link.up && wanted.contains(&instance(to)) && alive(to) {
                    steps.push(Step::Connect(at, to));
                }
                if link.up && self.budget.breaks > 0 {
                    steps.push(Step::Break(at, to));
                }
            }
            let known = node.replica.routing().version;
            for (_, table) in &self.tables {
                if table.version > known {
                    steps.push(Step::Route(at, table.version));
                }
            }
            let report = node.replica.report().1;
            if self.reports[at].as_ref() != Some(report) && self.budget.changes > 0 {
                steps.push(Step::Report(at));
            }
            if self.budget.crashes > 0 {
                steps.push(Step::Crash(at));
            }
        }
        for (at, push) in self.pushes.iter().enumerate() {
            let busy: Vec<u32> = push
                .waits
                .iter()
                .flat_map(|(_, slots)| slots.clone())
                .collect();
            if push.attempts < u64::from(self.budget.sends) {
                for to in 0..self.nodes.len() {
                    if alive(to) && !self.missing(at, to, &busy).is_empty() {
                        steps.push(Step::Send(at, to));
                    }
                }
                if !push.waits.is_empty() {
                    steps.push(Step::GiveUp(at));
                }
            }
        }
        if self.budget.changes > 0 {
            self.changes(&mut steps);
        }
        if self.budget.time > 0 {
            steps.push(Step::Time);
        }
        steps
    }

    /// What can arrive on the connections from a master to a backup.
    fn arrivals(&self, at: usize, to: usize, steps: &mut Vec<Step>) {
        let (link, alive) = (&self.links[at][to], self.nodes[to].is_some());
        if let Some((_, item)) = link.there.front().filter(|_| alive) {
            steps.push(Step::There(at, to));
            let new = link
                .there
                .iter()
                .any(|(_, item)| matches!(item, Item::Hello));
            if new && !matches!(item, Item::Hello) && !link.heard {
                steps.push(Step::DropOld(at, to));
            }
        }
        if link.up && !link.back.is_empty() {
            steps.push(Step::Back(at, to));
        }
        if !link.beats.is_empty() && alive {
            steps.push(Step::Beat(at, to));
        }
        if link.up && !link.read_leases.is_empty() {
            steps.push(Step::ReadLease(at, to));
        }
    }

    /// What a client would send of a push to a node: the slots it masters by some routing that
    /// the client may have, without those acknowledged or under way.
    pub(super) fn missing(&self, push: usize, to: usize, busy: &[u32]) -> Vec<u32> {
        let open = |slot: &&u32| {
            let known = self.nodes[to]
                .as_ref()
                .is_some_and(|node| node.rows.serving_state(**slot) != ServingState::Elsewhere);
            !self.pushes[push].acknowledged.contains(*slot) && !busy.contains(slot) && known
        };
        self.touches[push].iter().filter(open).copied().collect()
    }

    fn changes(&self, steps: &mut Vec<Step>) {
        let (sets, table) = self.newest();
        for (slot, set) in sets.iter().enumerate() {
            let Some(master) = set.master else { continue };
            let dead = |node: usize| self.nodes[node].is_none();
            for &backup in &set.in_sync {
                if !dead(backup) && (dead(master) || !self.budget.forced) {
                    steps.push(Step::Promote(slot, backup, false));
                    if !dead(master) {
                        steps.push(Step::Promote(slot, backup, true));
                    }
                }
                let report = self.reports[master].as_ref();
                let reported = report.is_some_and(|report| {
                    report.routing_version == table.version
                        && report.silent.contains(&instance(backup))
                });
                if reported || dead(backup) || self.budget.groundless {
                    steps.push(Step::TakeOut(slot, backup));
                }
            }
            for &node in &set.catching_up {
                let report = self.reports[master].as_ref();
                let entry = (slot as u32, set.term, instance(node));
                let reported = report.is_some_and(|report| {
                    report.routing_version == table.version && report.caught_up.contains(&entry)
                });
                if reported && !dead(node) {
                    steps.push(Step::TakeIn(slot, node));
                }
                if self.budget.groundless {
                    steps.push(Step::Drop(slot, node));
                }
            }
            for node in 0..self.nodes.len() {
                let held = master == node
                    || set.in_sync.contains(&node)
                    || set.catching_up.contains(&node);
                if !held && !dead(node) {
                    steps.push(Step::Add(slot, node));
                }
            }
        }
    }

    /// Write a new routing table.
    pub(super) fn change(&mut self, slot: usize, change: impl FnOnce(&mut Set)) {
        let (mut sets, old) = self.newest().clone();
        let before = sets[slot].clone();
        change(&mut sets[slot]);
        let set = &mut sets[slot];
        if (set.master, &set.in_sync) != (before.master, &before.in_sync) {
            set.term += 1;
        }
        let gone: Vec<NodeId> = (0..self.nodes.len())
            .filter(|&node| self.budget.sure && self.nodes[node].is_none())
            .map(instance)
            .collect();
        let new = table(old.version + 1, self.nodes.len(), &sets, &gone);
        self.tables.push((sets, new));
        self.budget.changes -= 1;
    }
}
