"""The disk side: file formats, writing, reading, and the commit of a checkpoint by all ranks together."""
