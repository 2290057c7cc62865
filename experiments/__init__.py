"""Gradient accumulation schedules for looped language models, and the experiment that compares them.

Nothing here imports the product that freezes, runs and packs the experiment, and the product never imports this
package: the two meet only in the trial functions of `experiments.trials`.
"""
