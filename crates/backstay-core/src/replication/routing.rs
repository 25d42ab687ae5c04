//! The routing record of the coordination store, as the data plane needs it.

use std::collections::BTreeSet;

use serde::Deserialize;

use super::NodeId;
use crate::error::Refusal;

/// The replicas of a slot. Nodes are named by their processes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReplicaSet {
    /// Its master; 0 if it has none now.
    pub master: NodeId,
    /// The nodes that have staged everything that was acknowledged.
    pub in_sync: Vec<NodeId>,
    /// The nodes that are still copied.
    pub catching_up: Vec<NodeId>,
}

/// A node of the routing table.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Member {
    /// Its process.
    pub instance: NodeId,
    /// Its name.
    pub node_id: String,
    /// `host:port` of its data plane.
    pub data_address: String,
}

/// See the module's documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutingTable {
    /// Grows with every change.
    pub version: u64,
    /// The nodes that hold slots, or may.
    pub members: Vec<Member>,
    /// Processes known for sure to be dead.
    pub gone: Vec<NodeId>,
    sets: Vec<ReplicaSet>,
    set_of_slot: Vec<u32>,
    terms: Vec<u64>,
    epochs: Vec<u64>,
    restoring: BTreeSet<u32>,
}

/// Slots whose content is to come from a checkpoint before they are served.
#[derive(Default, Deserialize)]
struct Restoring {
    slots: BTreeSet<u32>,
}

/// The record as it is stored; fields that only others need are ignored.
#[derive(Deserialize)]
struct Record {
    format: u32,
    version: u64,
    slot_count: u32,
    nodes: Vec<Member>,
    gone: Vec<NodeId>,
    sets: Vec<(i64, Vec<usize>, Vec<usize>)>,
    set_of_slot: Vec<u32>,
    term_of_slot: Vec<u64>,
    epoch_of_slot: Vec<u64>,
    #[serde(default)]
    restoring: Restoring,
}

/// The only layout of the record there is.
const FORMAT: u32 = 2;

impl RoutingTable {
    /// Read the record. Refuses one that contradicts itself, or of other than `slots` slots.
    pub fn from_json(text: &str, slots: u32) -> Result<Self, Refusal> {
        let wrong = |what: String| Refusal::InvalidRequest(format!("routing record: {what}"));
        let record: Record =
            serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        if record.format != FORMAT {
            return Err(wrong(format!(
                "format {} is not {FORMAT}: nodes of different releases meet",
                record.format
            )));
        }
        let lengths = [
            record.set_of_slot.len(),
            record.term_of_slot.len(),
            record.epoch_of_slot.len(),
            record.slot_count as usize,
        ];
        if lengths.iter().any(|&length| length != slots as usize) {
            return Err(wrong(format!("{lengths:?} slots, this node has {slots}")));
        }
        let instance = |index: usize| {
            let member = record.nodes.get(index);
            member
                .map(|member| member.instance)
                .ok_or_else(|| wrong(format!("node {index} of {}", record.nodes.len())))
        };
        let instances = |list: &[usize]| {
            list.iter()
                .map(|&index| instance(index))
                .collect::<Result<Vec<_>, _>>()
        };
        let mut sets = Vec::with_capacity(record.sets.len());
        for (master, in_sync, catching_up) in &record.sets {
            sets.push(ReplicaSet {
                master: usize::try_from(*master).map_or(Ok(0), instance)?,
                in_sync: instances(in_sync)?,
                catching_up: instances(catching_up)?,
            });
        }
        if let Some(bad) = record
            .set_of_slot
            .iter()
            .find(|&&set| set as usize >= sets.len())
        {
            return Err(wrong(format!("set {bad} of {}", sets.len())));
        }
        Ok(Self {
            version: record.version,
            members: record.nodes,
            gone: record.gone,
            sets,
            set_of_slot: record.set_of_slot,
            terms: record.term_of_slot,
            epochs: record.epoch_of_slot,
            restoring: record.restoring.slots,
        })
    }

    /// A table of one node that holds everything alone.
    pub fn alone(version: u64, slots: u32, node: NodeId) -> Self {
        Self {
            version,
            members: Vec::new(),
            gone: Vec::new(),
            sets: vec![ReplicaSet {
                master: node,
                ..ReplicaSet::default()
            }],
            set_of_slot: vec![0; slots as usize],
            terms: vec![1; slots as usize],
            epochs: vec![1; slots as usize],
            restoring: BTreeSet::new(),
        }
    }

    /// A process's name, for people.
    pub fn name(&self, instance: NodeId) -> String {
        let member = self.members.iter().find(|one| one.instance == instance);
        member.map_or_else(|| format!("{instance:#x}"), |one| one.node_id.clone())
    }

    /// How many slots there are.
    pub fn slots(&self) -> u32 {
        self.set_of_slot.len() as u32
    }

    /// Who holds a slot.
    pub fn replicas(&self, slot: u32) -> &ReplicaSet {
        &self.sets[self.set_of_slot[slot as usize] as usize]
    }

    /// The slot's term.
    pub fn term(&self, slot: u32) -> u64 {
        self.terms[slot as usize]
    }

    /// The version at which the slot's content began, empty.
    pub fn epoch(&self, slot: u32) -> u64 {
        self.epochs[slot as usize]
    }

    /// Whether the slot's content is to come from a checkpoint before it is served.
    pub fn is_restoring(&self, slot: u32) -> bool {
        self.restoring.contains(&slot)
    }
}
