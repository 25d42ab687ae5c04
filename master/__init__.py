"""The job master: hands out tasks to workers that come and go, each record of a pass once."""

if __name__ != "backstay.master":
    raise ImportError("import this package as backstay.master: the folder is a part of backstay")
