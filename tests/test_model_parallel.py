"""One model under tensor, sequence, context and pipeline parallelism: two processes over gloo."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from megatron.core import parallel_state

from nvfp4.models.attention import zigzag_positions
from nvfp4.models.configs import MambaConfig, ModelConfig, list_linears
from nvfp4.models.hybrid import build
from nvfp4.models.mamba2 import Mamba2Mixer
from nvfp4.models.parameters import shard
from nvfp4.precision.policy import PrecisionConfig, resolve

CFG = ModelConfig(
    pattern="M*-M",
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    mamba=MambaConfig(num_heads=8, head_dim=8, state_dim=16, num_groups=2),
    vocab_size=64,
    seq_length=32,
    position="rope",
)
LAYOUTS = {"alone": {}, "tp": {"tensor": 2}, "tp_sp": {"tensor": 2, "sequence": True},
           "cp": {"context": 2}, "pp": {"pipeline": 2}}  # fmt: skip


def make(tensor=1, pipeline=1, context=1, sequence=False):
    """The model of this process under a layout, with some values away from their defaults."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, pipeline, context_parallel_size=context)
    sizes = SimpleNamespace(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        context_parallel_size=context,
        sequence_parallel=sequence,
    )
    plan = resolve(list_linears(CFG), PrecisionConfig(default="fp32"))
    return build(CFG, plan, dtype="fp32", parallel=sizes, seed=0)


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(CFG.vocab_size, (2, CFG.seq_length), generator=generator)
    return ids, ids.roll(-1, 1)


def run(model, layout, rank):
    """Forward and backward of the summed loss; returns this rank's share of the loss."""
    ids, labels = batch()
    if layout == "cp":
        mine = zigzag_positions(CFG.seq_length, 2, ids.device)[rank]
        ids, labels = ids[:, mine], labels[:, mine]
    if layout != "pp":
        loss = model(ids, None, None, labels=labels).sum()
        loss.backward()
        return loss.item()
    hidden_shape = (CFG.seq_length, len(ids), CFG.hidden_size)
    if rank == 0:
        hidden = model(ids, None, None)
        dist.send(hidden.detach().contiguous(), 1)
        gradient = torch.empty(hidden_shape)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
        return 0.0
    hidden = torch.empty(hidden_shape)
    dist.recv(hidden, 0)
    model.set_input_tensor(hidden.requires_grad_())
    loss = model(ids, None, None, labels=labels).sum()
    loss.backward()
    dist.send(hidden.grad, 0)
    return loss.item()


def gathered_gradients(model, layout):
    """Global name -> gradient, summed over the ranks that hold the same parameter."""
    gradients = {model.global_name(n): p.grad.clone() for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if layout == "cp" or getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradients[model.global_name(name)])
    return gradients


def pieces(model):
    """Local name -> how the shard of one rank is cut out of the whole, as (dim, part sizes)."""
    found = {}
    for name, parameter in model.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False):
            dim = parameter.partition_dim
            found[name] = dim, [parameter.shape[dim]]
    for name, module in model.named_modules():
        if isinstance(module, Mamba2Mixer):
            found[f"{name}.in_proj.weight"] = 0, module.in_proj_split
            for leaf in ("weight", "bias"):
                found[f"{name}.conv1d.{leaf}"] = 0, module.conv_split
    return found


def worker(rank, store_file, report_file):
    from megatron.core import tensor_parallel

    from nvfp4.engine import cpu

    torch.set_num_threads(1)
    store = dist.FileStore(store_file, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    # The communication of sequence and context parallelism names CUDA devices.
    cpu.install()
    report = {}
    for layout, sizes in LAYOUTS.items():
        model = make(**sizes)
        if layout == "alone":
            tensor_parallel.model_parallel_cuda_manual_seed(1)
            whole_weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        cut = pieces(model) if sizes.get("tensor", 1) > 1 else {}

        def part(name, value, cut=cut):
            return shard(value, *cut[name], rank, 2) if name in cut else value

        names = {n: model.global_name(n) for n, _ in model.named_parameters()}
        same_start = all(
            torch.equal(p, part(n, whole_weights[names[n]])) for n, p in model.named_parameters()
        )
        loss = torch.tensor(run(model, layout, rank))
        if layout in ("cp", "pp"):
            dist.all_reduce(loss)
        gradients = gathered_gradients(model, layout)
        if layout == "alone":
            whole_loss, whole_gradients = loss.item(), gradients
        worst = 0.0
        for name, full_name in names.items():
            truth = part(name, whole_gradients[full_name])
            worst = max(worst, ((gradients[full_name] - truth).norm() / truth.norm()).item())
        report[layout] = {
            "same_start": same_start,
            "loss": abs(loss.item() / whole_loss - 1),
            "gradient": worst,
            "linears": [(n, m.layer_index, m.feature_offset, m.in_feature_offset)
                        for n, m in model.linears()],
        }  # fmt: skip
    torch.save(report, f"{report_file}{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    torch.multiprocessing.spawn(worker, (str(folder / "store"), str(folder / "report")), 2)
    return [torch.load(folder / f"report{rank}") for rank in (0, 1)]


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_layout_changes_neither_start_nor_loss_nor_gradients(reports, layout):
    for report in reports:
        assert report[layout]["same_start"]
        assert report[layout]["loss"] < 1e-6
        assert report[layout]["gradient"] < 1e-5


def test_pipeline_stages_keep_the_names_and_numbers_of_the_whole_model(reports):
    alone, second = ({row[0]: row[1:] for row in reports[1][k]["linears"]} for k in ("alone", "pp"))
    assert set(second) == {name for name in alone if name.split(".")[2:3] not in (["0"], ["1"])}
    assert all(second[name] == alone[name] for name in second)


def test_tensor_parallel_ranks_know_where_their_features_begin(reports):
    offsets = {row[0]: row[2:] for row in reports[1]["tp"]["linears"]}
    assert offsets["decoder.layers.2.mlp.linear_fc1"] == (32, 0)
    assert offsets["decoder.layers.2.mlp.linear_fc2"] == (0, 32)
    assert all(row[2:] == (0, 0) for row in reports[0]["tp"]["linears"])
