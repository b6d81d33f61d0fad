"""What every program does alike for itself: flags, listening sockets, the log's format, offers of other protocols,
origins of web pages.

Owns: conventions of the programs, none of which another program can observe on a connection.
Must not know: the wire contract in the modules beside this package, nor which program runs.
"""
