"""Weight decay, schedule, and the two repairs of the distributed optimizer under torch's AdamW."""

import pytest
import torch
from engine_runs import small, started

UNDECAYED = ("A_log", "dt_bias", ".D", "bias", "norm.weight", "layernorm.weight")


@pytest.fixture(scope="module", params=["plain", "distributed"])
def recipe(request, tmp_path_factory):
    distributed = f"parallel.distributed_optimizer={request.param == 'distributed'}".lower()
    folder = tmp_path_factory.mktemp("optimizer")
    return small(
        folder, distributed, "optim.lr=1.0", "optim.weight_decay=0.5", "schedule.min_lr=0.25"
    )


@pytest.fixture(scope="module")
def world(recipe):
    with started(recipe) as world:
        yield world


def build(recipe, world):
    from nvfp4.engine.optimizer import build_optimizer, build_schedule
    from nvfp4.engine.step import build_model

    model, _ = build_model(recipe, world)
    optimizer = build_optimizer(recipe, model)
    return model, optimizer, build_schedule(recipe, optimizer)


def test_no_decay_where_decay_has_no_meaning(recipe, world):
    """All gradients zero, learning rate 1, decay 0.5: what moves is what decays."""
    model, optimizer, schedule = build(recipe, world)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    schedule.step(increment=2 * recipe.train.global_batch_size)
    assert optimizer.param_groups[0]["lr"] == 1.0
    model.zero_grad_buffer()
    optimizer.step()
    kept = 0
    for name, parameter in model.named_parameters():
        if name.endswith(UNDECAYED):
            assert torch.equal(parameter, before[name]), name
            kept += 1
        else:
            assert torch.equal(parameter, before[name] * 0.5), name
    # 2 mixers x (conv bias, dt_bias, A_log, D, gated norm), a norm in each of 4 blocks, the final
    assert kept == 2 * 5 + 4 + 1


def test_schedule_rises_stays_and_ends_at_min_lr(recipe, world):
    _, optimizer, schedule = build(recipe, world)
    rates = []
    for _ in range(recipe.steps):
        schedule.step(increment=recipe.train.global_batch_size)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[:2] == [0.5, 1.0]  # warmup_steps 2
    assert rates[2:-1] == [1.0] * (recipe.steps - 3)  # decay_steps 1
    assert rates[-1] == recipe.schedule.min_lr
    assert {group["lr"] for group in optimizer.param_groups} == {rates[-1]}


def step_with_gradients(model, optimizer):
    for i, parameter in enumerate(model.parameters()):
        parameter.main_grad.copy_(
            torch.linspace(-1, 1, parameter.numel()).view_as(parameter) * (i + 1)
        )
    optimizer.step()
    optimizer.zero_grad()


def test_resumed_optimizer_counts_steps_once(recipe, world, tmp_path):
    """The step after a load moves the weights as that after the save did, bit for bit."""
    from nvfp4.engine import checkpoint

    state = checkpoint.TrainState(*build(recipe, world), step=3, samples=12)
    for _ in range(3):
        step_with_gradients(state.model, state.optimizer)
    checkpoint.save(tmp_path, state, {}, recipe, world)
    step_with_gradients(state.model, state.optimizer)

    again = checkpoint.TrainState(*build(recipe, world))
    path, record = checkpoint.find_newest(tmp_path, print, world)
    checkpoint.load(path, record, again)
    assert (again.step, again.samples) == (3, 12)
    step_with_gradients(again.model, again.optimizer)
    for (name, old), new in zip(
        state.model.named_parameters(), again.model.parameters(), strict=True
    ):
        assert torch.equal(old, new), name
    inner = again.optimizer.chained_optimizers[0].optimizer
    assert {s["step"].item() for s in inner.state.values()} == {4.0}
    assert len({s["step"].data_ptr() for s in inner.state.values()}) == len(inner.state)


@pytest.mark.parametrize("recipe", ["distributed"], indirect=True)
def test_without_the_repairs_a_load_fails_or_counts_wrong(recipe, world, tmp_path, monkeypatch):
    from nvfp4.engine import checkpoint, optimizer

    state = checkpoint.TrainState(*build(recipe, world))
    step_with_gradients(state.model, state.optimizer)
    checkpoint.save(tmp_path, state, {}, recipe, world)
    found = checkpoint.find_newest(tmp_path, print, world)

    monkeypatch.setattr(optimizer, "_give_each_parameter_its_step", lambda optimizer: None)
    bare = checkpoint.TrainState(*build(recipe, world))
    with pytest.raises(KeyError, match="step"):
        checkpoint.load(*found, bare)
    inner = bare.optimizer.chained_optimizers[0].optimizer
    assert len({s["step"].data_ptr() for s in inner.state.values()}) == 1


def test_hyperparameters_of_a_resumed_run_are_those_of_its_recipe(recipe, world, tmp_path):
    from nvfp4.engine import checkpoint

    state = checkpoint.TrainState(*build(recipe, world))
    step_with_gradients(state.model, state.optimizer)
    checkpoint.save(tmp_path, state, {}, recipe, world)
    optim = recipe.optim.model_copy(update={"lr": 0.5, "betas": (0.8, 0.9)})
    changed = recipe.model_copy(update={"optim": optim})
    again = checkpoint.TrainState(*build(changed, world))
    checkpoint.load(*checkpoint.find_newest(tmp_path, print, world), again)
    again.schedule.step(increment=3 * recipe.train.global_batch_size)
    assert {group["lr"] for group in again.optimizer.param_groups} == {0.5}
    assert {tuple(group["betas"]) for group in again.optimizer.param_groups} == {(0.8, 0.9)}
    assert {group["weight_decay"] for group in again.optimizer.param_groups} == {0.5, 0.0}
