//! What must hold in every state.

use super::*;

impl World {
    /// What must hold in every state; an error says what does not.
    pub fn check(&self) -> Result<(), String> {
        for slot in 0..self.slots {
            self.check_acknowledged(slot)?;
            self.check_decided(slot)?;
            self.check_equal(slot)?;
        }
        for (at, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            if node.replica.counters.unfit_promotions > 0 {
                return Err(format!("node {at} was made master without being in sync"));
            }
            self.check_once(at, node)?;
            self.check_reads(at, node)?;
        }
        Ok(())
    }

    /// I1: what is acknowledged is in every in-sync replica.
    fn check_acknowledged(&self, slot: u32) -> Result<(), String> {
        let set = &self.newest().0[slot as usize];
        let mut holders = set.in_sync.clone();
        holders.extend(set.master);
        for (push, one) in self.pushes.iter().enumerate() {
            if !one.acknowledged.contains(&slot) {
                continue;
            }
            for &holder in &holders {
                let node = self.nodes[holder].as_ref();
                if node.is_some_and(|node| !node.holds(id(push), slot)) {
                    return Err(format!(
                        "push {push} was acknowledged in slot {slot}, and node {holder}, which is in sync, lacks it"
                    ));
                }
            }
        }
        Ok(())
    }

    /// I4: what is applied anywhere was decided, so every replica in sync holds it.
    fn check_decided(&self, slot: u32) -> Result<(), String> {
        let set = &self.newest().0[slot as usize];
        for (at, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            if node.replica.slot_state(slot).2 || node.replica.epoch(slot) != set.epoch {
                continue;
            }
            let engine = node.rows.0.borrow();
            for push in 0..self.pushes.len() {
                if !Node::applied(&engine, id(push), slot) {
                    continue;
                }
                let lacks = |holder: &&usize| {
                    let node = self.nodes[**holder].as_ref();
                    node.is_some_and(|node| !node.holds(id(push), slot))
                };
                if let Some(other) = set.in_sync.iter().chain(&set.master).find(lacks) {
                    return Err(format!(
                        "node {at} has applied push {push} in slot {slot}, which was not decided: node {other}, in sync, lacks it"
                    ));
                }
            }
        }
        Ok(())
    }

    /// I2: each push changes each of its rows once.
    fn check_once(&self, at: usize, node: &Node) -> Result<(), String> {
        let engine = node.rows.0.borrow();
        let table = engine.table(table_id("t")).unwrap();
        for (push, slots) in self.touches.iter().enumerate() {
            for &slot in slots {
                if node.replica.slot_state(slot).2 {
                    continue; // A copy that is under way.
                }
                if self.deletes(push) {
                    continue; // Its rows are those of the first.
                }
                let gone = (0..self.touches.len())
                    .any(|other| self.deletes(other) && Node::applied(&engine, id(other), slot));
                let mut value = [0.0];
                table.read(&[key(self.slots, push, slot)], &mut value);
                let applied = f32::from(u8::from(Node::applied(&engine, id(push), slot)));
                // The rate of each attempt is above 1 and below 2, and a stale one's a part of that.
                if self.budget.stale {
                    value[0] = value[0].ceil().min(1.0);
                }
                let was_deleted = push == 0 && gone && value[0] == 0.0;
                if value[0].floor() != applied && !was_deleted {
                    return Err(format!(
                        "push {push} counts {} times in slot {slot} of node {at}, remembered {applied} times",
                        value[0]
                    ));
                }
            }
        }
        Ok(())
    }

    /// I4: at the same position the same bytes.
    fn check_equal(&self, slot: u32) -> Result<(), String> {
        let mut seen: Vec<(usize, u64, u64)> = Vec::new();
        let mut counted: Vec<(usize, (u64, u64), Vec<u64>)> = Vec::new();
        for (at, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            if node.replica.slot_state(slot).2 {
                continue;
            }
            let engine = node.rows.0.borrow();
            let (position, digest) = (engine.position(slot), engine.digest(slot));
            for &(other, known, known_digest) in &seen {
                if known == position && known_digest != digest {
                    return Err(format!(
                        "slot {slot} differs between nodes {other} and {at} at position {position}"
                    ));
                }
            }
            seen.push((at, position, digest));
            let mut origins = Vec::new();
            let keys = [key(self.slots, 0, slot)];
            engine.origins(table_id("t"), &keys, &mut origins).unwrap();
            let life = (node.replica.epoch(slot), position);
            let differs = |one: &&(usize, (u64, u64), Vec<u64>)| one.1 == life && one.2 != origins;
            if let Some((other, ..)) = counted.iter().find(differs) {
                return Err(format!(
                    "slot {slot} has counted other updates on node {other} than on node {at} at position {position}"
                ));
            }
            counted.push((at, life, origins));
        }
        Ok(())
    }

    /// I3, I5: who may answer reads has applied everything that was acknowledged.
    fn check_reads(&self, at: usize, node: &Node) -> Result<(), String> {
        if self.now >= node.replica.serving_until() {
            return Ok(());
        }
        let engine = node.rows.0.borrow();
        for slot in 0..self.slots {
            if engine.serving_state(slot) != ServingState::Serving {
                continue;
            }
            for (push, one) in self.pushes.iter().enumerate() {
                let told = one.acknowledged.contains(&slot);
                if told && !Node::applied(&engine, id(push), slot) {
                    return Err(format!(
                        "node {at} may answer reads of slot {slot} without push {push}, which was acknowledged"
                    ));
                }
            }
        }
        Ok(())
    }
}
