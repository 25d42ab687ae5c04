//! One certificate setting for the data plane, as PEM, turned into rustls configurations.

use std::sync::Arc;

use rustls::server::WebPkiClientVerifier;
use rustls::RootCertStore;
pub use rustls::{ClientConfig, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use thiserror::Error;

/// A certificate, key or authority that cannot be used.
#[derive(Debug, Error)]
#[error("{what}: {reason}")]
pub struct TlsError {
    what: &'static str,
    reason: String,
}

fn problem<E: std::fmt::Display>(what: &'static str) -> impl Fn(E) -> TlsError {
    move |reason| TlsError {
        what,
        reason: reason.to_string(),
    }
}

/// A certificate chain with its key.
#[derive(Clone, Copy)]
pub struct Identity<'a> {
    /// The chain, PEM, own certificate first.
    pub cert_pem: &'a [u8],
    /// Its private key, PEM.
    pub key_pem: &'a [u8],
}

impl Identity<'_> {
    fn parse(self) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), TlsError> {
        let what = "tls_cert_file";
        let chain: Vec<_> = CertificateDer::pem_slice_iter(self.cert_pem)
            .collect::<Result<_, _>>()
            .map_err(problem(what))?;
        if chain.is_empty() {
            return Err(problem(what)("holds no certificate in PEM form"));
        }
        let key = PrivateKeyDer::from_pem_slice(self.key_pem).map_err(problem("tls_key_file"))?;
        Ok((chain, key))
    }
}

fn roots(ca_pem: &[u8]) -> Result<RootCertStore, TlsError> {
    let what = "tls_ca_file";
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(ca_pem) {
        roots
            .add(certificate.map_err(problem(what))?)
            .map_err(problem(what))?;
    }
    if roots.is_empty() {
        return Err(problem(what)("holds no certificate in PEM form"));
    }
    Ok(roots)
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A server's side. With `client_ca_pem`, clients must show a certificate it signed.
pub fn server(
    identity: Identity<'_>,
    client_ca_pem: Option<&[u8]>,
) -> Result<Arc<ServerConfig>, TlsError> {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(problem("TLS"))?;
    let builder = match client_ca_pem {
        None => builder.with_no_client_auth(),
        Some(ca) => {
            let verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots(ca)?), provider())
                    .build()
                    .map_err(problem("tls_ca_file"))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let (chain, key) = identity.parse()?;
    Ok(Arc::new(
        builder
            .with_single_cert(chain, key)
            .map_err(problem("tls_cert_file"))?,
    ))
}

/// A client's side: trusts what `ca_pem` signed, shows `identity` if the server asks.
pub fn client(
    ca_pem: &[u8],
    identity: Option<Identity<'_>>,
) -> Result<Arc<ClientConfig>, TlsError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(problem("TLS"))?
        .with_root_certificates(roots(ca_pem)?);
    let config = match identity {
        None => builder.with_no_client_auth(),
        Some(identity) => {
            let (chain, key) = identity.parse()?;
            builder
                .with_client_auth_cert(chain, key)
                .map_err(problem("tls_cert_file"))?
        }
    };
    Ok(Arc::new(config))
}
