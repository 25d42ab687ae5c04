from backstay._version import __version__ as __version__
from backstay.jobs_api import Job as Job
from backstay.jobs_api import submit as submit
from backstay.jobs_api import train as train

__all__ = ["Job", "__version__", "submit", "train"]
