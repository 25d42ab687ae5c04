//! A real server on loopback, a client that writes whatever bytes it likes, and a good client
//! that must be served all the same.

// Each test program uses a part of it. A helper that fails is a test that fails.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::float_cmp)]

use std::future::Future;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use backstay_core::compensation::Compensation;
use backstay_core::hash::{table_id, SlotSpace};
use backstay_core::replication::ReplicaOptions;
use backstay_core::spec::TableSpec;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::Change;
use backstay_core::wire::{
    ErrorMeta, Header, Hello, HelloReply, Limits, Opcode, PullMeta, PullReply, PushMeta, PushReply,
    HEADER_BYTES,
};
use backstay_net::client::plan::Plan;
use backstay_net::client::routing::Routing;
use backstay_net::client::{Client, ClientError, ClientOptions, Deadline, PushRequest};
use backstay_net::server::{Server, ServerOptions};
use backstay_net::store::Store;

pub const SLOTS: u32 = 64;
pub const DIM: usize = 2;
/// Longer than anything here takes; a test that waits so long has failed.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// Every request of [`Raw::read`] and friends accepts what the server may send.
pub const ANY: Limits = Limits {
    max_frame_bytes: 1 << 32,
    max_keys: u32::MAX,
};
static NEXT_STREAM: AtomicU64 = AtomicU64::new(1);

/// Limits and times small enough to be reached in a test.
pub fn options() -> ServerOptions {
    ServerOptions {
        cluster_id: "c".into(),
        node_id: "n".into(),
        instance: 7,
        token: None,
        tls: None,
        io_threads: 2,
        limits: Limits {
            max_frame_bytes: 1 << 20,
            max_keys: 1 << 14,
        },
        max_connections: 64,
        handshake_timeout: PATIENCE,
        stall_timeout: PATIENCE,
        peer_tls: None,
        stream_grace: Duration::from_secs(3600),
        counts_process: false,
        replica: ReplicaOptions::default(),
    }
}

/// A server with the tables `t` (refuses NaN) and `clipped` (clips to 1), rows of [`DIM`]
/// zeros, SGD with rate 1.
pub fn start(options: ServerOptions) -> Server {
    start_with_memory(options, 0)
}

/// The same with a limit on rows' memory; 0 means none.
pub fn start_with_memory(options: ServerOptions, memory_limit_bytes: u64) -> Server {
    let space = SlotSpace::new(SLOTS).unwrap();
    let store = Arc::new(Store::new(space, memory_limit_bytes));
    store.set_routing(1, &[true; SLOTS as usize]);
    for (name, policy) in [
        ("t", r#""refuse""#),
        ("clipped", r#"{"clip":{"limit":1.0}}"#),
    ] {
        let spec = format!(
            r#"{{"name":"{name}","kind":{{"sparse":{{"dim":{DIM}}}}},"initializer":{{"zeros":{{}}}},"optimizer":{{"sgd":{{"learning_rate":1.0}}}},"non_finite":{policy}}}"#
        );
        let spec = TableSpec::from_json(&spec).unwrap();
        store.create_table(&Arc::new(spec), 1).unwrap();
    }
    Server::start(TcpListener::bind("127.0.0.1:0").unwrap(), options, store).unwrap()
}

/// How a well-behaved client would be set up for [`start`].
pub fn client_options() -> ClientOptions {
    ClientOptions {
        cluster_id: "c".into(),
        token: None,
        tls: None,
        client_name: "good".into(),
        connect_timeout: PATIENCE,
        stall_timeout: PATIENCE,
        max_frame_bytes: 1 << 20,
        part_bytes: 1 << 16,
        max_pushes_in_flight: 8,
    }
}

/// Run a client's calls.
pub fn block_on<T>(calls: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(calls)
}

/// A client of the one server at `address`, and a key that no other client here uses.
pub fn client(address: &str, options: ClientOptions) -> Result<(Arc<Client>, u64), ClientError> {
    let job = NEXT_STREAM.fetch_add(1, Ordering::Relaxed) << 32;
    let stream = StreamId {
        job,
        pass: 0,
        task: 0,
    };
    let client = Client::new(options, stream);
    let server = address.into();
    client.set_routing(Routing::new(1, vec![server], &[0; SLOTS as usize])?);
    Ok((client, job))
}

/// Push gradients to table `t`, [n * DIM], and wait for the outcome.
pub async fn push_all(
    client: &Client,
    plan: &Plan,
    values: &[f32],
    deadline: Deadline,
) -> Result<(), ClientError> {
    let change = Change::update(1.0);
    let request = PushRequest {
        require_finite: true,
        ..PushRequest::new(table_id("t"), DIM, change, values)
    };
    let push = client.push(&request, plan, deadline).await?;
    push.wait(client).await
}

/// A good client connects to `address`, pushes to a key of its own and pulls it back.
pub fn use_well(address: &str, options: ClientOptions) -> Result<(), ClientError> {
    use_well_within(address, options, PATIENCE)
}

/// The same with so much time for it.
pub fn use_well_within(
    address: &str,
    options: ClientOptions,
    time: Duration,
) -> Result<(), ClientError> {
    let deadline = Deadline::after(time);
    block_on(async {
        let (client, key) = client(address, options)?;
        let plan = Arc::new(client.plan(&[key])?);
        push_all(&client, &plan, &[-1.0, -2.0], deadline).await?;
        let mut rows = [0.0; DIM];
        let mut pull = client.pull(table_id("t"), DIM, &plan, deadline).await?;
        pull.finish(&mut rows, deadline).await?;
        assert_eq!(rows, [1.0, 2.0], "a good client's push is there");
        client.close(deadline).await
    })
}

/// Wait until `condition` holds; a server notices some things without telling anybody.
pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::yield_now();
    }
}

/// After a hostile act: a good client is still served.
pub fn assert_still_serves(server: &Server) {
    use_well(&server.address().to_string(), client_options()).unwrap();
}

/// A frame as it came.
#[derive(Debug)]
pub struct Received {
    pub header: Header,
    pub meta: Vec<u8>,
    pub body: Vec<u8>,
}

/// A connection that sends any bytes.
pub struct Raw {
    pub stream: TcpStream,
}

impl Raw {
    pub fn connect(server: &Server) -> Self {
        let stream = TcpStream::connect(server.address()).unwrap();
        stream.set_nodelay(true).unwrap();
        // So that a server that does not answer fails the test instead of hanging it.
        stream.set_read_timeout(Some(PATIENCE * 2)).unwrap();
        stream.set_write_timeout(Some(PATIENCE * 2)).unwrap();
        Self { stream }
    }

    /// Connect and shake hands.
    pub fn greeted(server: &Server) -> Self {
        let mut raw = Self::connect(server);
        raw.send(&hello("c", ""));
        let reply = raw.expect(Opcode::HelloReply, 0);
        assert_eq!(HelloReply::decode(&reply.meta).unwrap().slot_count, SLOTS);
        raw
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// No more bytes will come from here.
    pub fn finish_sending(&mut self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }

    /// The next frame; `None` if the server closed.
    pub fn read(&mut self) -> Option<Received> {
        let mut head = [0; HEADER_BYTES];
        if !self.fill(&mut head) {
            return None;
        }
        let header = Header::decode(&head, &ANY).unwrap();
        let mut meta = vec![0; header.meta_bytes as usize];
        let mut body = vec![0; header.body_bytes as usize];
        assert!(self.fill(&mut meta) && self.fill(&mut body), "{header:?}");
        Some(Received { header, meta, body })
    }

    pub fn expect(&mut self, opcode: Opcode, request_id: u64) -> Received {
        let received = self.read().expect("a frame, not the end");
        let found = (received.header.opcode, received.header.request_id);
        let text = String::from_utf8_lossy(&received.body);
        assert_eq!(found, (opcode, request_id), "{text:?}");
        received
    }

    /// An error frame with this number and code, whose text holds `words`.
    pub fn expect_error(&mut self, request_id: u64, code: u16, words: &str) -> ErrorMeta {
        let received = self.expect(Opcode::Error, request_id);
        let meta = ErrorMeta::decode(&received.meta).unwrap();
        let text = String::from_utf8(received.body).unwrap();
        assert_eq!(meta.code, code, "{text}");
        assert!(text.contains(words), "{text:?} does not say {words:?}");
        meta
    }

    pub fn expect_push_reply(&mut self, request_id: u64) -> PushReply {
        PushReply::decode(&self.expect(Opcode::PushReply, request_id).meta).unwrap()
    }

    /// The rows of a pull's answer, [n * DIM].
    pub fn expect_rows(&mut self, request_id: u64) -> Vec<f32> {
        let received = self.expect(Opcode::PullReply, request_id);
        let reply = PullReply::decode(&received.meta).unwrap();
        assert_eq!(reply.row_elements as usize, DIM);
        assert_eq!(received.body.len(), reply.row_count as usize * DIM * 4);
        bytemuck::pod_collect_to_vec(&received.body)
    }

    /// The server has closed, and nothing more comes.
    pub fn expect_closed(&mut self) {
        if let Some(frame) = self.read() {
            panic!("{frame:?} came instead of the end");
        }
    }

    /// False if the server closed before the first byte.
    fn fill(&mut self, out: &mut [u8]) -> bool {
        let mut have = 0;
        while have < out.len() {
            match self.stream.read(&mut out[have..]) {
                Ok(0) => break,
                Ok(count) => have += count,
                // The server closed while bytes of ours were on their way.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
                Err(error) => panic!("{error} after {have} of {} bytes", out.len()),
            }
        }
        assert!(have == 0 || have == out.len(), "cut off in a frame");
        have == out.len()
    }
}

/// A whole frame.
pub fn frame(opcode: Opcode, request_id: u64, meta: &[u8], body: &[u8]) -> Vec<u8> {
    let mut bytes = head(opcode, request_id, meta.len() as u32, body.len() as u64);
    bytes.extend_from_slice(meta);
    bytes.extend_from_slice(body);
    bytes
}

/// A header that announces parts of these sizes.
pub fn head(opcode: Opcode, request_id: u64, meta_bytes: u32, body_bytes: u64) -> Vec<u8> {
    let header = Header {
        opcode,
        flags: 0,
        request_id,
        meta_bytes,
        checksum: 0,
        body_bytes,
    };
    header.encode().to_vec()
}

pub fn hello(cluster_id: &str, token: &str) -> Vec<u8> {
    let hello = Hello {
        cluster_id: cluster_id.into(),
        token: token.into(),
        client_name: "hostile".into(),
    };
    frame(Opcode::Hello, 0, &hello.encode(), &[])
}

/// A pull's meta part for rows of [`DIM`].
pub fn pull_meta(table: &str, keys: usize) -> PullMeta {
    PullMeta {
        table: table_id(table),
        routing_version: 1,
        key_count: keys as u32,
        row_elements: DIM as u32,
        origins: false,
        sums: false,
    }
}

pub fn pull(request_id: u64, table: &str, keys: &[u64]) -> Vec<u8> {
    let meta = pull_meta(table, keys.len()).encode();
    frame(Opcode::Pull, request_id, &meta, bytemuck::cast_slice(keys))
}

/// A push's meta part for rows of [`DIM`], in stream `job`.
pub fn push_meta(table: &str, keys: usize, job: u64, sequence: u64, floor: u64) -> PushMeta {
    let stream = StreamId {
        job,
        pass: 0,
        task: 0,
    };
    PushMeta {
        table: table_id(table),
        routing_version: 1,
        id: TransactionId { stream, sequence },
        floor,
        key_count: keys as u32,
        row_elements: DIM as u32,
        change: Change::update(1.0),
        origins: false,
        compensation: Compensation::Ignore,
    }
}

pub fn push_frame(request_id: u64, meta: &PushMeta, keys: &[u64], values: &[f32]) -> Vec<u8> {
    let mut body = bytemuck::cast_slice::<u64, u8>(keys).to_vec();
    body.extend_from_slice(bytemuck::cast_slice(values));
    frame(Opcode::Push, request_id, &meta.encode(), &body)
}

/// A push of -1 to every element of `keys`, in stream `job`: SGD adds 1 to each.
pub fn push(request_id: u64, table: &str, keys: &[u64], job: u64, sequence: u64) -> Vec<u8> {
    let meta = push_meta(table, keys.len(), job, sequence, 0);
    push_frame(request_id, &meta, keys, &vec![-1.0; keys.len() * DIM])
}

/// `count` different keys from `first` on, sorted by slot.
pub fn keys(first: u64, count: u64) -> Vec<u64> {
    let space = SlotSpace::new(SLOTS).unwrap();
    let mut keys: Vec<u64> = (first..first + count).collect();
    keys.sort_by_key(|&key| space.slot_of(key));
    keys
}
