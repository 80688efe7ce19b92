"""Worlds to run in without a GPU: servers in virtual time, and servers over real HTTP."""
