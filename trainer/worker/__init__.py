"""A worker process: takes tasks from the job's master, trains, and tells what was acknowledged."""
