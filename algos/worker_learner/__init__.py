"""The shared code of the scripts: what they import, and in which order a run uses it.

    run = Run(args, __file__)
        checks the arguments, replaces every `auto`, joins the other learners, seeds torch
    args = run.args
        the arguments of this learner (a training process), one of `run.world_size` learners
    workers = Workers(run, collect)
        makes the environments, here or in --num-workers processes
    agent = Agent(workers.observation_space, workers.action_space, args).to(run.device)
    rollout = workers.start(agent, args.num_steps)
        starts the processes; `rollout` has tensors (num_steps, num_envs, ...), to be filled
    replay = ReplayBuffer(run, rollout, args.buffer_size)    # where the algorithm has one
    learn = run.compile(update)                # the same function, compiled as --compile says
    step = run.start(agent=agent, optimizer=optimizer, workers=workers)
        makes the run folder, or after --resume restores the saved state; starts the evaluator
    while step < args.total_steps:
        rollout = workers.collect()            # collect(agent, envs, rollout), wherever they are
        ...                                    # the algorithm; between backward() and step():
        average_gradients(agent)               # over the learners; with one it does nothing
        run.log_episodes(step, rollout)        # returns of the episodes that ended
        run.log(step, losses)                  # metrics.csv and TensorBoard; UserError at NaN
        run.evaluate(step)                     # if due, in the evaluator's process
        run.checkpoint(step)                   # after `evaluate`; if due, paused or stopped
    return run.finish(step)                    # the last save and evaluation, a summary

`agent` is an `nn.Module` whose `forward` is the deterministic policy: raw observation in, action of
the environment out. Weights and trajectories cross process borders in shared memory; pipes carry
only signals. Children end with their parent, however it ends. Several learners: learners.py.
"""

from torch.distributions import Distribution

from algos.worker_learner.arguments import ReplayArgs, RunArgs, TransitionArgs, UserError, parse
from algos.worker_learner.learners import (
    average_gradients,
    mean_over_learners,
    std_mean_over_learners,
    var_mean_over_learners,
)
from algos.worker_learner.normalizers import Normalizer, RewardScaler
from algos.worker_learner.replay import ReplayBuffer
from algos.worker_learner.run import Result, Run
from algos.worker_learner.workers import Workers

Distribution.set_default_validate_args(False)  # checks take time; on a GPU each synchronises
