//! The Python binding of backstay's data plane.
