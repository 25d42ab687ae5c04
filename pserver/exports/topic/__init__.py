"""A topic of Kafka that has the rows of a running export. See docs/internals/exports.md."""
