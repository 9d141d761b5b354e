"""Documents -> tokens -> rows -> batches.

`sources` makes a TrainingData of a data configuration, `loader` its batches.
"""
