"""A process that has imported everything and waits, so that commands begin at once: each is a fork of it.

`bankfull warm` starts it. A later command that finds it hands over its arguments, environment and open files
(`handover`), and passes signals on until its fork ends (`client`). It has no model and no thread: a fork is as free as
a new process. Whoever differs in anything that a process inherits or reads while it imports begins by itself.
"""
