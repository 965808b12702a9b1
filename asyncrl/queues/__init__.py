"""The schedule: who may start (budget), who is trained next (experience), and how groups travel (codec)."""
