"""The engine of a job: what a job is and how it goes.

Events come in as calls. Out come replies to callers, records to write, and the wish of worker
processes. The job master drives the engine over the coordination store, `--local` over memory, and
the simulator over a store of its own. Everything is decided from arguments alone: time comes from
a clock that is given, random orders come from seeds. Imports ``backstay.schedule``,
``backstay.job``, the records of the coordination store and numpy. It has no clock, thread, socket
or file.
"""
