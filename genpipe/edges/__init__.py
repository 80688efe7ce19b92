"""Everything that touches the world: files, sockets, the terminal. Edges know the core and nobody else."""
