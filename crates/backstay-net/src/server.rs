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

use crate::frame_io::{drain, write_frame};
use crate::peer_link::keep_links;
use crate::replicator::{
    periods, relief,
    streams::{ENDED_AT_ONCE, LOOK_EVERY},
    Replicator,
};
use crate::session::Session;
pub use crate::shared::ServerOptions;
use crate::shared::{stop_signal, Shared};
use crate::socket;
use crate::stats::{add, Counters, Snapshot};
use crate::store::Store;

/// The resident memory of the process is asked for once in so many looks at the memory: three times a second.
const LOOKS_PER_RESIDENT: u32 = 3;
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
        runtime.spawn(end_silent_streams(Arc::clone(&shared), stop_signal.clone()));
        runtime.spawn(keep_periods(Arc::clone(&shared), stop_signal.clone()));
        runtime.spawn(keep_memory(Arc::clone(&shared), stop_signal.clone()));
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

async fn end_silent_streams(shared: Arc<Shared>, mut stopping: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            () = stop_signal(&mut stopping) => return,
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
        let replicator = Arc::clone(&shared.replicator);
        // A look at all streams, and transactions: not among the connections.
        let look =
            tokio::task::spawn_blocking(move || replicator.end_silent_streams(ENDED_AT_ONCE));
        if let Err(error) = look.await {
            warn!(%error, "the look at silent streams has failed");
        }
    }
}

async fn keep_periods(shared: Arc<Shared>, mut stopping: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            () = stop_signal(&mut stopping) => return,
            () = tokio::time::sleep(periods::LOOK_EVERY) => {}
        }
        if shared.store.tables_with_periods().is_empty() {
            continue;
        }
        let one = Arc::clone(&shared);
        // It waits for backups: not among the connections.
        let look = tokio::task::spawn_blocking(move || {
            let gone = one.replicator.keep_periods();
            one.counters.count_gone(&gone);
        });
        if let Err(error) = look.await {
            warn!(%error, "the look at the periods of tables has failed");
        }
    }
}

/// Look at the memory, and let tables give up rows while it is short.
async fn keep_memory(shared: Arc<Shared>, mut stopping: watch::Receiver<bool>) {
    let mut looks = 0u32;
    loop {
        tokio::select! {
            () = stop_signal(&mut stopping) => return,
            () = tokio::time::sleep(relief::LOOK_EVERY) => {}
        }
        let (one, asks) = (
            Arc::clone(&shared),
            looks.is_multiple_of(LOOKS_PER_RESIDENT),
        );
        looks = looks.wrapping_add(1);
        // It reads a file, and waits for backups: not among the connections.
        let look = tokio::task::spawn_blocking(move || {
            if asks && one.options.counts_process {
                one.store.memory().look();
            }
            let gone = one.replicator.relieve();
            one.counters.count_gone(&gone);
        });
        if let Err(error) = look.await {
            warn!(%error, "the look at the memory has failed");
        }
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
