"""PPO of Stable-Baselines3 as an arm of stability.py: the same flags, the same metrics.csv.

    python benchmark/stable_baselines.py --env Hopper --seed 1 --run-dir runs/sb3

Its own defaults, one environment and one thread, observations and rewards normalised. After each
evaluation it saves what `--resume DIR` goes on with (in a new episode).
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize


@dataclass
class Options:
    """Train, and write metrics.csv as the scripts of algos/ do."""

    env: str = "Hopper"
    """environment: a name of Gymnasium's MuJoCo environments without its version"""
    seed: int = 0
    """seed of everything that is random"""
    total_steps: int = 1_000_000
    """how many environment steps to train for"""
    eval_every: int = 40_000
    """steps between evaluations of the deterministic policy"""
    eval_episodes: int = 10
    """episodes of one evaluation"""
    run_dir: Path = Path("runs/stable_baselines")
    """folder of this run"""
    resume: str = ""
    """go on with the run in this folder, with its arguments"""


def make(options: Options, seed: int, num_envs: int = 1, training: bool = True) -> VecNormalize:
    slim = {"include_cfrc_ext_in_observation": False} if options.env == "Ant" else {}
    envs = make_vec_env(f"{options.env}-v5", num_envs, seed=seed, env_kwargs=slim)
    return VecNormalize(envs, training=training, norm_reward=training)


def main(options: Options) -> None:
    torch.set_num_threads(1)
    if options.resume:
        saved = json.loads((Path(options.resume) / "args.json").read_text())
        options = Options(**saved | {"run_dir": Path(options.resume)})
    folder = options.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    state, metrics = folder / "state.json", folder / "metrics.csv"
    (folder / "args.json").write_text(json.dumps(asdict(options), default=str))
    envs, rows, seconds = make(options, options.seed), ["step,seconds,tag,value\n"], 0.0
    if state.exists():
        saved = json.loads(state.read_text())
        rows, seconds = saved["rows"], saved["seconds"]
        envs = VecNormalize.load(folder / f"{saved['step']}.pkl", envs.venv)
        model = PPO.load(folder / f"{saved['step']}.zip", envs, device="cpu")
    else:
        model = PPO("MlpPolicy", envs, seed=options.seed, device="cpu")
    score_envs = make(options, options.seed + 1_000_000, options.eval_episodes, training=False)
    while (step := model.num_timesteps) < options.total_steps:
        start = time.perf_counter()
        due = min(options.total_steps, step - step % options.eval_every + options.eval_every)
        model.learn(due - step, reset_num_timesteps=False)  # to the end of the rollout after it
        seconds += time.perf_counter() - start
        score_envs.obs_rms = envs.obs_rms
        score_envs.seed(options.seed + model.num_timesteps)
        mean, std = evaluate_policy(model, score_envs, options.eval_episodes)
        tags = {"eval/episodic_return": mean, "eval/episodic_return_std": std}
        before = f"{model.num_timesteps},{seconds:.3f}"
        rows += [f"{before},{tag},{value:.8g}\n" for tag, value in tags.items()]
        model.save(folder / f"{model.num_timesteps}.zip")
        envs.save(folder / f"{model.num_timesteps}.pkl")
        content = {"step": model.num_timesteps, "seconds": seconds, "rows": rows}
        state.with_suffix(".tmp").write_text(json.dumps(content))
        state.with_suffix(".tmp").replace(state)  # from here on it resumes at this step
        for old in (f"{step}.zip", f"{step}.pkl"):
            (folder / old).unlink(missing_ok=True)
    metrics.write_text("".join(rows))


if __name__ == "__main__":
    main(tyro.cli(Options))
