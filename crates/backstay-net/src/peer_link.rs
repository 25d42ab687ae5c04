//! Connections to backups. A master opens two to each node that replicates one of its slots, and
//! opens both again when one breaks. One carries orders and their answers, the other heartbeats and
//! read leases, which must not wait behind orders.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use backstay_core::error::Refusal;
use backstay_core::replication::{Message, NodeId, Way};
use backstay_core::wire::peer::{self, Introduction, PeerFrame, Purpose};
use backstay_core::wire::{Hello, HelloReply, Limits, Opcode, HEADER_BYTES};
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tracing::{debug, info};

use crate::frame_io::{write_encoded, write_frame, FrameReader, ReadError};
use crate::shared::{stop_signal, Shared};
use crate::socket;
use crate::stats::add;

type Reader = FrameReader<Box<dyn AsyncRead + Send + Unpin>>;
type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// Pauses between tries to connect: doubling.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// How often the state machine is told the time.
const TICK: Duration = Duration::from_millis(20);

/// Why there is no connection.
enum Broken {
    /// The port refuses connections, or another process listens there: the process is gone.
    Gone(String),
    /// Anything else.
    Trouble(String),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionRefused => Self::Gone(error.to_string()),
            _ => Self::Trouble(error.to_string()),
        }
    }
}

impl From<ReadError> for Broken {
    fn from(error: ReadError) -> Self {
        Self::Trouble(error.to_string())
    }
}

impl From<Refusal> for Broken {
    fn from(refusal: Refusal) -> Self {
        Self::Trouble(refusal.to_string())
    }
}

/// Give the state machine the time, and keep its connections, until the server stops.
pub(crate) async fn keep_links(
    shared: Arc<Shared>,
    mut stopping: tokio::sync::watch::Receiver<bool>,
) {
    let mut links: BTreeMap<(NodeId, String), AbortHandle> = BTreeMap::new();
    let mut wanted = shared.replicator.links();
    // A routing that came before this task began counts as a change, too.
    wanted.mark_changed();
    let mut clock = tokio::time::interval(TICK);
    clock.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop_signal(&mut stopping) => break,
            _ = clock.tick() => {
                if shared.replicator.tick() {
                    let shared = Arc::clone(&shared);
                    tokio::spawn(async move { shared.replicator.work() });
                }
            }
            changed = wanted.changed() => {
                if changed.is_err() {
                    break;
                }
                let wanted: BTreeMap<NodeId, String> = wanted.borrow_and_update().clone();
                links.retain(|(node, address), link| {
                    let kept = wanted.get(node) == Some(address);
                    if !kept {
                        link.abort();
                    }
                    kept
                });
                for (node, address) in wanted {
                    links.entry((node, address.clone())).or_insert_with(|| {
                        tokio::spawn(keep_link(Arc::clone(&shared), node, address)).abort_handle()
                    });
                }
            }
        }
    }
    for link in links.into_values() {
        link.abort();
    }
}

/// Tells the state machine that a connection is over, even if its task is aborted.
struct Open<'a> {
    shared: &'a Shared,
    node: NodeId,
    connection: u64,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.shared.replicator.link_down(self.node, self.connection);
    }
}

async fn keep_link(shared: Arc<Shared>, node: NodeId, address: String) {
    let mut pause = FIRST_PAUSE;
    loop {
        let connection = shared.replicator.next_connection();
        match open(&shared, node, &address, connection).await {
            Ok([(reader, writer), (read_leases, heartbeats)]) => {
                info!(node, address, "replicating to a backup");
                shared.replicator.link_up(node, connection);
                let open = Open {
                    shared: &shared,
                    node,
                    connection,
                };
                let why = tokio::select! {
                    why = send(&shared, node, Way::ToBackup, connection, writer) => why,
                    why = send(&shared, node, Way::Heartbeats, connection, heartbeats) => why,
                    why = receive(&shared, node, connection, reader) => why,
                    why = receive(&shared, node, connection, read_leases) => why,
                };
                debug!(node, address, why, "the connection to a backup is over");
                drop(open);
                pause = FIRST_PAUSE;
            }
            Err(Broken::Gone(why)) => {
                debug!(node, address, why, "a backup's process is gone");
                shared.replicator.no_link(node, true);
            }
            Err(Broken::Trouble(why)) => {
                debug!(node, address, why, "no connection to a backup");
                shared.replicator.no_link(node, false);
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Connect, shake hands and introduce this node, for each purpose.
async fn open(
    shared: &Shared,
    node: NodeId,
    address: &str,
    connection: u64,
) -> Result<[(Reader, Writer); 2], Broken> {
    let limit = shared.options.handshake_timeout;
    let open = |purpose| shake_hands(shared, node, address, connection, purpose);
    let both = async { tokio::try_join!(open(Purpose::Orders), open(Purpose::Heartbeats)) };
    let (orders, heartbeats) = timeout(limit, both)
        .await
        .unwrap_or_else(|_| Err(Broken::Trouble(format!("no handshake within {limit:?}"))))?;
    Ok([orders, heartbeats])
}

async fn shake_hands(
    shared: &Shared,
    node: NodeId,
    address: &str,
    connection: u64,
    purpose: Purpose,
) -> Result<(Reader, Writer), Broken> {
    let options = &shared.options;
    let stream = TcpStream::connect(address).await?;
    socket::prepare(&stream)?;
    let (reader, mut writer): (Box<dyn AsyncRead + Send + Unpin>, Writer) = match &options.peer_tls
    {
        None => {
            let (reader, writer) = stream.into_split();
            (Box::new(reader), Box::new(writer))
        }
        Some(tls) => {
            let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
            let name = ServerName::try_from(host.to_owned())
                .map_err(|error| Broken::Trouble(error.to_string()))?;
            let connector = TlsConnector::from(Arc::clone(tls));
            let (reader, writer) = tokio::io::split(connector.connect(name, stream).await?);
            (Box::new(reader), Box::new(writer))
        }
    };
    let memory = shared.store.memory();
    let mut reader = FrameReader::counted(reader, options.stall_timeout, memory);
    let hello = Hello {
        cluster_id: options.cluster_id.clone(),
        token: options.token.clone().unwrap_or_default(),
        client_name: format!("pserver {}", options.node_id),
    };
    write_frame(&mut writer, Opcode::Hello, 0, &hello.encode(), &[]).await?;
    let limits = Limits {
        max_frame_bytes: 4096,
        max_keys: 0,
    };
    let frame = reader.next(&limits, Vec::new()).await?;
    let frame = frame.ok_or_else(|| Broken::Trouble("closed during the handshake".into()))?;
    if frame.header.opcode != Opcode::HelloReply {
        return Err(Broken::Trouble("the handshake was refused".into()));
    }
    let reply = HelloReply::decode(&frame.meta)?;
    if reply.instance != node {
        let what = format!("process {:#x} listens at its address now", reply.instance);
        return Err(Broken::Gone(what));
    }
    let me = Introduction {
        instance: options.instance,
        connection,
        purpose,
    };
    write_encoded(&mut writer, &me.encode()).await?;
    Ok((reader, writer))
}

/// Send what the state machine has for a node; returns why that is over.
async fn send(
    shared: &Shared,
    node: NodeId,
    way: Way,
    connection: u64,
    mut writer: Writer,
) -> String {
    let bell = shared.replicator.bell(node, way);
    loop {
        let Some(messages) = shared.replicator.take_outgoing(node, way, connection) else {
            return "replaced by a newer one".into();
        };
        for message in messages {
            if let Err(why) = send_one(shared, &mut writer, &message).await {
                return why;
            }
        }
        bell.notified().await;
    }
}

async fn send_one(shared: &Shared, writer: &mut Writer, message: &Message) -> Result<(), String> {
    let encoded = peer::encode(message);
    add(&shared.counters.peer_bytes_sent, encoded.bytes() as u64);
    let sent = write_encoded(writer, &encoded);
    match timeout(shared.options.stall_timeout, sent).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("it takes nothing any more".into()),
    }
}

/// Take answers in; returns why that is over.
async fn receive(shared: &Shared, node: NodeId, connection: u64, mut reader: Reader) -> String {
    let limits = Limits {
        max_frame_bytes: 64 * 1024,
        max_keys: 0,
    };
    let space = shared.store.space();
    loop {
        let frame = match reader.next(&limits, Vec::new()).await {
            Ok(Some(frame)) => frame,
            Ok(None) => return "closed by the backup".into(),
            Err(error) => return error.to_string(),
        };
        let bytes = frame.header.body_bytes as usize;
        let received = HEADER_BYTES + frame.meta.len() + bytes;
        add(&shared.counters.peer_bytes_received, received as u64);
        match frame.header.opcode {
            Opcode::Peer => match peer::decode(space, &frame.meta, frame.body, bytes) {
                Ok(PeerFrame::Message(message)) => {
                    shared.replicator.receive(node, connection, message);
                }
                Ok(PeerFrame::Introduction(_)) => return "an introduction as an answer".into(),
                Err(refusal) => return refusal.to_string(),
            },
            Opcode::GoAway => return "the backup stops".into(),
            opcode => return format!("unexpected {opcode:?}"),
        }
    }
}
