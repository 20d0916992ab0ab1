"""What a run will need, before there is one: the layout of a model that only its ``config.json`` describes, and what follows from it."""
