//! The pure core of backstay: rows, optimizers, transactions and the wire format.
//!
//! Nothing here opens a socket, reads a clock, starts a thread or draws a random number:
//! the same calls in the same order give the same bytes on every replica, and a simulator
//! can drive them.
