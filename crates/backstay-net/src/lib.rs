//! The data plane of backstay over TCP: the server's and the client's runtime.
