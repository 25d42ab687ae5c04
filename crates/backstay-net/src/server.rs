//! The server: a listener, a session for each connection, and an orderly stop.

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use backstay_core::error::Refusal;
use backstay_core::wire::{ErrorMeta, Opcode};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tracing::{debug, warn};

use crate::clock;
use crate::frame_io::{drain, write_frame};
use crate::peer_link::keep_links;
use crate::replicator::{periods, relief, streams, Replicator};
use crate::session::Session;
pub use crate::shared::ServerOptions;
use crate::shared::{stop_signal, Shared};
use crate::socket;
use crate::stats::{add, Counters, Snapshot};
use crate::store::Store;

/// Time between two looks at what the process has resident, and at what copies have left behind.
const RESIDENT_EVERY: Duration = Duration::from_millis(100);
/// How long to wait after the system refused to accept (out of file descriptors, say).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A running data plane.
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    stopping: watch::Sender<bool>,
    /// Closed when the last session has ended.
    drained: watch::Receiver<bool>,
    /// Taken by the stop.
    runtime: Mutex<Option<Runtime>>,
}

impl Server {
    /// Serve on a bound listener (the caller owns the choice of port).
    pub fn start(
        listener: StdListener,
        options: ServerOptions,
        store: Arc<Store>,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(options.io_threads.max(1))
            .thread_name("backstay-data")
            .enable_all()
            .build()?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let listener = {
            let _inside = runtime.enter();
            TcpListener::from_std(listener)?
        };
        let replicator = Replicator::new(options.instance, Arc::clone(&store), options.replica);
        let grace = options.stream_grace.as_micros();
        replicator.set_stream_grace(u64::try_from(grace).unwrap_or(u64::MAX));
        let shared = Arc::new(Shared {
            options,
            store,
            replicator,
            counters: Counters::default(),
        });
        let (stopping, stop_signal) = watch::channel(false);
        let (drained_sender, drained) = watch::channel(false);
        runtime.spawn(keep_links(Arc::clone(&shared), stop_signal.clone()));
        for chore in CHORES {
            runtime.spawn(repeat(chore, Arc::clone(&shared), stop_signal.clone()));
        }
        let accepting = Arc::clone(&shared);
        runtime.spawn(async move {
            accept(accepting, listener, stop_signal).await;
            // Perhaps no caller waits.
            let _ = drained_sender.send(true);
        });
        Ok(Self {
            shared,
            address,
            stopping,
            drained,
            runtime: Mutex::new(Some(runtime)),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its part in replication.
    pub fn replicator(&self) -> &Arc<Replicator> {
        &self.shared.replicator
    }

    /// The rows it serves.
    pub fn store(&self) -> &Arc<Store> {
        &self.shared.store
    }

    /// Its counters.
    pub fn snapshot(&self) -> Snapshot {
        let store = &self.shared.store;
        self.shared.counters.snapshot(
            store.routing_version(),
            store.allocated_bytes(),
            store.memory().parts(),
            self.shared.replicator.slot_counts(),
            self.shared.replicator.snapshot(),
        )
    }

    /// Take no new requests, answer those being served, close. False if `grace` cut it off.
    pub fn stop(&self, grace: Duration) -> bool {
        let Some(runtime) = self.runtime.lock().take() else {
            return true;
        };
        self.shared.replicator.stop();
        self.stopping.send_replace(true);
        let mut drained = self.drained.clone();
        let wait = async move { drained.wait_for(|&drained| drained).await.is_ok() };
        let clean = runtime.block_on(async { tokio::time::timeout(grace, wait).await });
        runtime.shutdown_background();
        clean.unwrap_or(false)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.lock().take() {
            runtime.shutdown_background();
        }
    }
}

async fn accept(shared: Arc<Shared>, listener: TcpListener, mut stopping: watch::Receiver<bool>) {
    let mut sessions = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = stop_signal(&mut stopping) => break,
            Some(ended) = sessions.join_next(), if !sessions.is_empty() => log_end(ended),
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => {
                    add(&shared.counters.connections_accepted, 1);
                    let (shared, stopping) = (Arc::clone(&shared), stopping.clone());
                    sessions.spawn(serve(shared, stream, peer, stopping));
                }
                Err(error) => {
                    warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    while let Some(ended) = sessions.join_next().await {
        log_end(ended);
    }
}

/// Something that a server does by itself again and again, with a rest in between. Each one has its
/// own turns: none waits for another.
struct Chore {
    what: &'static str,
    every: Duration,
    /// Whether it goes on at once.
    work: fn(&Shared) -> bool,
}

const CHORES: [Chore; 4] = [
    Chore {
        what: "look at silent streams",
        every: streams::LOOK_EVERY,
        work: |shared| {
            let most = streams::ENDED_AT_ONCE;
            shared.replicator.end_silent_streams(most);
            false
        },
    },
    Chore {
        what: "look at the periods of tables",
        every: periods::LOOK_EVERY,
        work: |shared| {
            let (gone, is_left) = shared.replicator.keep_periods_for(periods::TURNS);
            shared.counters.count_gone(&gone);
            is_left
        },
    },
    Chore {
        what: "look at the memory",
        every: RESIDENT_EVERY,
        work: |shared| {
            shared.store.end_copies();
            if shared.options.counts_process {
                shared.store.memory().look(clock::now());
            }
            false
        },
    },
    // Evictions may take long, and go by what the chore before finds out.
    Chore {
        what: "relief of a shortage of memory",
        every: relief::LOOK_EVERY,
        work: |shared| {
            let gone = shared.replicator.relieve();
            shared.counters.count_gone(&gone);
            false
        },
    },
];

async fn repeat(chore: Chore, shared: Arc<Shared>, mut stopping: watch::Receiver<bool>) {
    let mut rest = chore.every;
    loop {
        tokio::select! {
            biased;
            () = stop_signal(&mut stopping) => return,
            () = tokio::time::sleep(rest) => {}
        }
        let (one, work) = (Arc::clone(&shared), chore.work);
        // It reads files, and waits for backups: not among the connections.
        rest = match tokio::task::spawn_blocking(move || work(&one)).await {
            Ok(true) => Duration::ZERO,
            Ok(false) => chore.every,
            Err(error) => {
                warn!(%error, "the {} has failed", chore.what);
                chore.every
            }
        };
    }
}

fn log_end(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        warn!(%error, "a session ended badly");
    }
}

async fn serve(
    shared: Arc<Shared>,
    stream: TcpStream,
    peer: SocketAddr,
    stopping: watch::Receiver<bool>,
) {
    let open = shared
        .counters
        .connections_open
        .fetch_add(1, Ordering::AcqRel)
        + 1;
    if let Err(error) = serve_counted(&shared, stream, peer, open, stopping).await {
        debug!(%peer, %error, "connection ended");
    }
    shared
        .counters
        .connections_open
        .fetch_sub(1, Ordering::AcqRel);
}

async fn serve_counted(
    shared: &Arc<Shared>,
    mut stream: TcpStream,
    peer: SocketAddr,
    open: u64,
    mut stopping: watch::Receiver<bool>,
) -> io::Result<()> {
    socket::prepare(&stream)?;
    let peer = peer.to_string();
    let options = &shared.options;
    if open > options.max_connections {
        add(&shared.counters.connections_refused, 1);
        return refuse_connection(&mut stream, options).await;
    }
    match &options.tls {
        None => {
            let (reader, writer) = stream.into_split();
            Session::new(Arc::clone(shared), reader, writer)
                .run(&peer, stopping)
                .await;
        }
        Some(tls) => {
            let acceptor = TlsAcceptor::from(Arc::clone(tls));
            let accept = tokio::time::timeout(options.handshake_timeout, acceptor.accept(stream));
            let stream = tokio::select! {
                () = stop_signal(&mut stopping) => return Ok(()),
                accepted = accept => accepted??,
            };
            let (reader, writer) = tokio::io::split(stream);
            Session::new(Arc::clone(shared), reader, writer)
                .run(&peer, stopping)
                .await;
        }
    }
    Ok(())
}

/// One connection too many: say so (in the clear only where everything is) and close.
async fn refuse_connection(stream: &mut TcpStream, options: &ServerOptions) -> io::Result<()> {
    if options.tls.is_some() {
        return Ok(());
    }
    let refusal = Refusal::LimitExceeded(format!(
        "{} connections are open, the limit (max_connections): close some or raise it",
        options.max_connections
    ));
    let meta = ErrorMeta {
        code: refusal.code(),
        retry_safe: true,
        routing_version: 0,
    };
    let (meta, text) = (meta.encode(), refusal.to_string());
    let write = write_frame(stream, Opcode::Error, 0, &meta, text.as_bytes());
    tokio::time::timeout(options.handshake_timeout, write).await??;
    stream.shutdown().await?;
    drain(stream).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;
    use std::time::Instant;

    use super::*;
    use backstay_core::hash::SlotSpace;
    use backstay_core::replication::ReplicaOptions;
    use backstay_core::wire::Limits;

    /// Longer than anything here takes.
    const PATIENCE: Duration = Duration::from_secs(20);

    fn options() -> ServerOptions {
        ServerOptions {
            cluster_id: "c".into(),
            node_id: "n".into(),
            instance: 7,
            token: None,
            tls: None,
            io_threads: 1,
            limits: Limits {
                max_frame_bytes: 1 << 20,
                max_keys: 1 << 14,
            },
            max_connections: 4,
            handshake_timeout: PATIENCE,
            stall_timeout: PATIENCE,
            peer_tls: None,
            stream_grace: PATIENCE,
            counts_process: true,
            replica: ReplicaOptions::default(),
        }
    }

    /// Evictions go by what the process takes, so somebody must look at it while they go on.
    #[test]
    fn the_memory_of_the_process_is_looked_at_while_tables_give_up_rows() {
        let store = Arc::new(Store::new(SlotSpace::new(4).unwrap(), 0));
        let listener = StdListener::bind("127.0.0.1:0").unwrap();
        let server = Server::start(listener, options(), store).unwrap();
        let process = || server.store().memory().parts().process;
        let wait_until = |what: &str, condition: &dyn Fn() -> bool| {
            let begun = Instant::now();
            while !condition() {
                assert!(begun.elapsed() < PATIENCE, "{what}");
                std::thread::yield_now();
            }
        };
        wait_until("a first look", &|| process() > 0);
        let relieving = server.replicator().hold_relief();
        let before = process();
        let ballast = black_box(vec![1u8; 96 << 20]);
        wait_until("a look at the ballast", &|| process() > before + (64 << 20));
        drop(ballast);
        wait_until("another look", &|| process() < before + (32 << 20));
        drop(relieving);
    }
}
