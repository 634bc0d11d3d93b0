"""A training run, the same for all three scripts: its folder, processes, steps, checkpoints and logs.

run_folder.py       what is written to out/; choosing, naming and locking the run folder
resume.py           starting a run or resuming one; the check that it is the same run
checkpoints.py      what a checkpoint contains; writing, checking, loading and deleting them
sharded_checkpoints.py   weights and moments of sharded runs, written by all processes in parts
fingerprints.py     hashes of models and data, compared on resuming
log_and_save.py     logging a step; saving a checkpoint and the result
garbage.py          Python's garbage collector, which works between two steps only
interrupts.py       Ctrl-C and SIGTERM: stop after the current step

optimizer_step.py   ``Learner``; gradients that fit into memory, clipping, the optimizer step
adamw.py            AdamW, and one whose moments are kept in bf16
learning_rate.py    the schedule of learning rates
gradient_sums.py    several processes: gradients are summed while the backward goes on
distributed.py      several processes or GPUs: sums, comparing weights, errors of one process
heartbeat.py        ends a process if another one has died, stopped or lost its connection
job.py              which run this is: started again by torchrun, or kept at an address
elastic.py          runs that torchrun starts again by itself; sizes for another number of processes
remote_folder.py    --out_dir at an address such as s3://

metrics.py          ``Metrics``: means over micro-batches and processes
run_logger.py       log files, progress bar, printed lines
displays.py         what each script shows: lines, curves, tables
panels.py           which metrics are drawn together, and what to look for
plots.py            curves.png
summary.py          summary.md: a verdict in words, and tables
samples.py          responses and distributions that are kept, in samples.jsonl and two more files
report.py           report.html: a whole run on one page
report_plots.py     its plots, which follow light and dark
report.html.jinja2  the page itself
health.py           what is unusual or wrong in a run, with causes and remedies; a command for run folders
health_read.py      reading a run folder for it
health_past.py      what its checks look at; they are in health_start.py, health_policy.py, health_critic.py,
                    health_responses.py and health_reward.py
commands.py         command lines to copy
trackers.py         SwanLab, TensorBoard, Weights & Biases, and how to add another tracker
"""
