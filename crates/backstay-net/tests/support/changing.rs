//! Servers that a test moves slots between, and a client that follows.

// Each test program uses a part of it.
#![allow(dead_code)]

use std::sync::Arc;
use std::time::Duration;

use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::stream::StreamId;
use backstay_core::transaction::Change;
use backstay_net::client::routing::{Routing, ServerAddress};
use backstay_net::client::{Client, ClientError, ClientOptions, Deadline, PushRequest};
use backstay_net::server::{Server, ServerOptions};

use crate::support::{client_options, options, start, DIM, PATIENCE, SLOTS};

pub const BRIEF: Duration = Duration::from_millis(400);
/// Longer than any failover here may take once the routing is known.
pub const AT_ONCE: Duration = Duration::from_millis(700);

pub fn address(node_id: &str, address: &str, instance: u64) -> ServerAddress {
    ServerAddress {
        node_id: node_id.into(),
        address: address.into(),
        instance,
    }
}

pub fn routing(version: u64, servers: &[ServerAddress], master: impl Fn(u32) -> u32) -> Routing {
    let masters: Vec<u32> = (0..SLOTS).map(master).collect();
    Routing::of(version, 0, servers.to_vec(), &masters).unwrap()
}

pub fn new_client(stall: Duration) -> Arc<Client> {
    let options = ClientOptions {
        stall_timeout: stall,
        max_frame_bytes: 1 << 26,
        part_bytes: 1 << 10,
        ..client_options()
    };
    let stream = StreamId {
        job: 5,
        pass: 0,
        task: 0,
    };
    Client::new(options, stream)
}

/// A client that goes by slots `0..SLOTS` all at `servers[0]`.
pub fn client_of(servers: &[ServerAddress]) -> Arc<Client> {
    let client = new_client(PATIENCE);
    assert!(client.set_routing(routing(1, servers, |_| 0)));
    client
}

pub fn server(instance: u64) -> (Server, ServerAddress) {
    let server = start(ServerOptions {
        instance,
        ..options()
    });
    let named = address(
        &format!("ps-{instance}"),
        &server.address().to_string(),
        instance,
    );
    (server, named)
}

pub fn update(values: &[f32]) -> PushRequest<'_> {
    PushRequest {
        table: table_id("t"),
        row_elements: DIM,
        change: Change::update(1.0),
        values,
        require_finite: true,
        observed: None,
        only_count: false,
        references: &[],
    }
}

pub async fn count(client: &Arc<Client>, keys: &[u64], time: Duration) -> Result<(), ClientError> {
    let plan = client.plan(keys)?;
    let values = vec![-1.0; keys.len() * DIM];
    let push = client
        .push(&update(&values), &plan, Deadline::after(time))
        .await?;
    push.wait(client).await
}

pub async fn rows(
    client: &Arc<Client>,
    keys: &[u64],
    time: Duration,
) -> Result<Vec<f32>, ClientError> {
    let plan = Arc::new(client.plan(keys)?);
    let mut out = vec![f32::NAN; keys.len() * DIM];
    let deadline = Deadline::after(time);
    let mut pull = client.pull(table_id("t"), DIM, &plan, deadline).await?;
    pull.finish(&mut out, deadline).await?;
    Ok(out.chunks(DIM).map(|row| row[0]).collect())
}

/// The counter of each key on one server, whichever node is its master.
pub fn counters(server: &Server, keys: &[u64]) -> Vec<f32> {
    let space = SlotSpace::new(SLOTS).unwrap();
    let count = |&key: &u64| {
        let slot = server.store().export_slot("t", space.slot_of(key)).unwrap();
        let at = slot.0.iter().position(|&known| known == key);
        at.map_or(0.0, |at| slot.1[at * DIM])
    };
    keys.iter().map(count).collect()
}
