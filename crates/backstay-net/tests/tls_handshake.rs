//! The data plane over TLS with certificates made for the test: who is let in, who is not.

// What fails in a helper is a failed test; exact numbers are the point.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::float_cmp)]

mod support;

use std::sync::Arc;
use std::time::Duration;

use backstay_net::client::ClientError;
use backstay_net::server::{Server, ServerOptions};
use backstay_net::tls::{self, Identity};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use support::{client_options, options, start, use_well_within, wait_until, Raw, PATIENCE};

/// Enough for a handshake on a loaded machine; callers that are not let in try so long.
const TIME: Duration = Duration::from_secs(5);

/// A certificate authority.
struct Authority(CertifiedIssuer<'static, KeyPair>);

/// What it signed: certificate and key, PEM.
struct Signed(String, String);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        Self(CertifiedIssuer::self_signed(params, key).unwrap())
    }

    fn pem(&self) -> String {
        self.0.pem()
    }

    fn sign(&self, name: &str) -> Signed {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Signed(certificate.pem(), key.serialize_pem())
    }
}

impl Signed {
    fn identity(&self) -> Identity<'_> {
        Identity {
            cert_pem: self.0.as_bytes(),
            key_pem: self.1.as_bytes(),
        }
    }
}

fn start_tls(own: &Signed, clients: Option<&Authority>) -> Server {
    let client_ca = clients.map(Authority::pem);
    let config = tls::server(own.identity(), client_ca.as_ref().map(String::as_bytes)).unwrap();
    start(ServerOptions {
        tls: Some(config),
        ..options()
    })
}

/// A good client that trusts `trusted` and shows `own`, calling the server by `host`.
fn call(
    server: &Server,
    host: &str,
    trusted: &Authority,
    own: Option<&Signed>,
) -> Result<(), ClientError> {
    let config = tls::client(trusted.pem().as_bytes(), own.map(Signed::identity)).unwrap();
    let mut options = client_options();
    options.tls = Some(config);
    use_well_within(
        &format!("{host}:{}", server.address().port()),
        options,
        TIME,
    )
}

#[test]
fn a_server_of_the_right_authority() {
    let authority = Authority::new();
    let server = start_tls(&authority.sign("127.0.0.1"), None);
    call(&server, "127.0.0.1", &authority, None).unwrap();
}

#[test]
fn a_server_of_a_wrong_authority() {
    let (authority, other) = (Authority::new(), Authority::new());
    let server = start_tls(&authority.sign("127.0.0.1"), None);
    let error = call(&server, "127.0.0.1", &other, None).unwrap_err();
    // At once: no later try would find another certificate.
    assert!(matches!(error, ClientError::Protocol { .. }), "{error}");
    assert!(error.to_string().contains("certificate"), "{error}");
    assert!(error.to_string().contains("127.0.0.1"), "{error}");
    call(&server, "127.0.0.1", &authority, None).unwrap();
}

#[test]
fn a_certificate_for_another_name() {
    let authority = Authority::new();
    let server = start_tls(&authority.sign("pserver-1.example.org"), None);
    let error = call(&server, "127.0.0.1", &authority, None).unwrap_err();
    assert!(matches!(error, ClientError::Protocol { .. }), "{error}");
    assert!(error.to_string().contains("certificate"), "{error}");
}

#[test]
fn a_client_of_the_right_authority() {
    let authority = Authority::new();
    let server = start_tls(&authority.sign("127.0.0.1"), Some(&authority));
    let own = authority.sign("trainer-0");
    call(&server, "127.0.0.1", &authority, Some(&own)).unwrap();
}

#[test]
fn a_client_without_a_certificate_where_one_is_needed() {
    let authority = Authority::new();
    let server = start_tls(&authority.sign("127.0.0.1"), Some(&authority));
    let error = call(&server, "127.0.0.1", &authority, None).unwrap_err();
    assert!(error.to_string().contains("127.0.0.1"), "{error}");
    let own = authority.sign("trainer-0");
    call(&server, "127.0.0.1", &authority, Some(&own)).unwrap();
}

#[test]
fn a_client_of_a_wrong_authority() {
    let (authority, other) = (Authority::new(), Authority::new());
    let server = start_tls(&authority.sign("127.0.0.1"), Some(&authority));
    let stranger = other.sign("trainer-0");
    let error = call(&server, "127.0.0.1", &authority, Some(&stranger)).unwrap_err();
    assert!(error.to_string().contains("127.0.0.1"), "{error}");
    let own = authority.sign("trainer-0");
    call(&server, "127.0.0.1", &authority, Some(&own)).unwrap();
}

#[test]
fn plain_bytes_to_a_server_that_speaks_tls() {
    let authority = Authority::new();
    let server = start_tls(&authority.sign("127.0.0.1"), None);
    let mut raw = Raw::connect(&server);
    raw.send(&support::hello("c", ""));
    // An alert of TLS may come first; what counts is that it ends.
    let mut rest = Vec::new();
    let _ = std::io::Read::read_to_end(&mut raw.stream, &mut rest);
    assert!(!rest.windows(4).any(|bytes| bytes == b"BKSY"));
    call(&server, "127.0.0.1", &authority, None).unwrap();
}

#[test]
fn a_stop_in_the_middle_of_a_tls_handshake() {
    let authority = Authority::new();
    let config = tls::server(authority.sign("127.0.0.1").identity(), None).unwrap();
    let server = start(ServerOptions {
        tls: Some(Arc::clone(&config)),
        handshake_timeout: PATIENCE * 100,
        ..options()
    });
    let silent = Raw::connect(&server);
    wait_until("a connection", || server.snapshot().connections_open == 1);
    assert!(server.stop(PATIENCE), "the stop was clean");
    drop(silent);
}
