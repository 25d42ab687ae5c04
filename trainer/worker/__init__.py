"""A worker process: takes tasks from the job master, trains, and tells what was acknowledged."""
