//! What every TCP connection of the data plane has in common.

use std::io;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// After so long without data the kernel asks whether the other side is there.
const IDLE: Duration = Duration::from_secs(30);
/// How often it is asked again, and how often in all: a machine that vanished without a word is
/// noticed after a minute, and its connection closed.
const INTERVAL: Duration = Duration::from_secs(10);
const RETRIES: u32 = 3;
/// A connection is given up when sent data is not confirmed for so long. By default the kernel
/// would try for a quarter of an hour.
#[cfg(target_os = "linux")]
const UNCONFIRMED: Duration = Duration::from_secs(20);

/// Send small frames at once, and notice a machine that vanished.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(IDLE)
        .with_interval(INTERVAL)
        .with_retries(RETRIES);
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(UNCONFIRMED))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn the_kernel_looks_after_idle_connections() -> io::Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let stream = TcpStream::connect(listener.local_addr()?).await?;
        assert!(!SockRef::from(&stream).keepalive()?);
        prepare(&stream)?;
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive()?);
        assert_eq!(socket.tcp_keepalive_time()?, IDLE);
        assert_eq!(socket.tcp_keepalive_retries()?, RETRIES);
        #[cfg(target_os = "linux")]
        assert_eq!(socket.tcp_user_timeout()?, Some(UNCONFIRMED));
        Ok(())
    }
}
