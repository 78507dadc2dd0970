"""Scaling studies: the points of a study, run one after the other on parts of one reservation, and what follows."""
