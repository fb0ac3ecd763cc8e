"""Takes a drafter and the processes, gives its fp32 masters whole or shared out, and their gradients summed; knows no losses.

Both kinds sum once a step, however many micro-batches it has, and in float32: the losses are divided by the weight of all
processes beforehand, so a sum is all there is to do (and a mean over processes would be wrong where rows are uneven).
"""

from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from outrider.config import Sharding
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter
from outrider.model.fused_drafter import FusedDrafter
from outrider.train.processes import Processes


class Masters(Protocol):
    """The fp32 parameters that the optimizer moves, under the drafter's names."""

    drafter: Drafter
    processes: Processes

    def micro_batch(self, *, last: bool) -> None:
        """Before each micro-batch's forward; `last` of the step."""

    def lend(self, fused: FusedDrafter) -> None:
        """Give the compute weights the present values, rounded."""

    def take_gradients(self, fused: FusedDrafter) -> None:
        """Add the compute weights' gradients of one micro-batch, in float32, and drop them there."""

    def sum_gradients(self) -> None:
        """After the last micro-batch: every `.grad` is the sum over micro-batches and processes."""

    def rest(self) -> None:
        """After forwards and backwards that no update follows: the masters stand as the optimizer knows them, without gradients.
        Every process must call it."""


class WholeMasters:
    """Every process holds all masters, gradients and optimizer state: data parallel ("ddp").

    torch's DistributedDataParallel sums what autograd's leaves hold, which are bf16 copies on the fused road; the fp32 sums are
    made behind it, so they are summed here, all at once, after the step's last micro-batch.

    On the fused road the masters' own memory is lent to the compute weights from a step's start to its last backward: a third of
    what the two would take apart, 3.2 GiB of a drafter of 1.7 B parameters.
    """

    def __init__(self, drafter: Drafter, processes: Processes) -> None:
        self.drafter, self.processes = drafter, processes
        self._last = True
        self._borrower: FusedDrafter | None = None

    def micro_batch(self, *, last: bool) -> None:
        self._last = last

    def lend(self, fused: FusedDrafter) -> None:
        self._borrower = fused
        fused.borrow(self.drafter)

    def take_gradients(self, fused: FusedDrafter) -> None:
        if self._last:  # before the gradients in float32 are born: it takes room to work
            fused.give_back()
        fused.give_gradients(self.drafter)

    def sum_gradients(self) -> None:
        gradients = [parameter.grad for parameter in self.drafter.parameters()]
        assert all(gradient is not None for gradient in gradients), "every process must sum the same tensors"
        self.processes.sum(cast(list[Tensor], gradients))

    def rest(self) -> None:
        if self._borrower is not None:
            self._borrower.give_back()
        self.drafter.zero_grad(set_to_none=True)


class ShardedMasters:
    """Masters, gradients and optimizer state shared out over the processes by FSDP2 (arXiv 2304.11277, fully_shard).

    The drafter is one group: what computes is whole while a step lasts. On the dense road FSDP2 gathers the fp32 weights and
    scatters the gradients inside forward and backward. On the fused road the compute copies stay whole on each device: they
    are gathered in their own dtype (half the bytes) at a step's start, and their gradients scattered in float32 at its end.
    With several micro-batches a step the whole gradient sums stand until the last one (fp32 on the fused road).
    """

    def __init__(self, drafter: Drafter, processes: Processes) -> None:
        self.drafter, self.processes = drafter, processes
        mesh = init_device_mesh(drafter.norm.weight.device.type, (processes.count,))
        self._module = fully_shard(drafter, mesh=mesh)
        self._module.set_gradient_divide_factor(1.0)
        self._module.set_force_sum_reduction_for_comms(True)  # gloo has no product before the sum
        self._last = True
        self._sums: dict[Tensor, Tensor] = {}  # by packed parameter: its gradients of the step's earlier micro-batches

    def micro_batch(self, *, last: bool) -> None:
        self._last = last
        self._module.set_requires_gradient_sync(last)

    @torch.no_grad()
    def lend(self, fused: FusedDrafter) -> None:
        if fused.norm.weight.is_meta:
            fused.to_empty(device=self.drafter.norm.weight.device)
        for share in fused.shares(self.drafter):
            share.of(share.packed).copy_(whole(share.master.detach().to(share.packed.dtype)))

    @torch.no_grad()
    def take_gradients(self, fused: FusedDrafter) -> None:
        for packed in fused.parameters():
            assert packed.grad is not None
            if packed in self._sums:
                self._sums[packed] += packed.grad
            else:
                self._sums[packed] = packed.grad if self._last else packed.grad.float()
            packed.grad = None
        if self._last:
            for share in fused.shares(self.drafter):
                _scatter(share.of(self._sums[share.packed]).float(), share.master)
            self._sums.clear()

    def sum_gradients(self) -> None:
        pass  # scattering them has summed them

    def rest(self) -> None:
        self._module.unshard()  # gradients of micro-batches before the last one stand on the whole weights until they are summed
        self.drafter.zero_grad(set_to_none=True)
        self._module.reshard()
        self._sums.clear()
        self.drafter.zero_grad(set_to_none=True)


def _scatter(gradient: Tensor, master: Tensor) -> None:
    """Make `master.grad` this process's piece of the sum of `gradient` over the processes."""
    assert isinstance(master, DTensor)
    mine = DTensor.from_local(gradient, master.device_mesh, [Partial()])
    master.grad = mine.redistribute(placements=master.placements)


def open_masters(drafter: Drafter, processes: Processes, sharding: Sharding) -> Masters:
    """The masters as `placement.sharding` says. To be called before the optimizer is made: sharding replaces parameters."""
    if sharding == "fsdp2" and processes.count > 1:
        return ShardedMasters(drafter, processes)
    return WholeMasters(drafter, processes)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be shared out. Every process must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_shared_out(drafter: Drafter) -> bool:
    """Does each process hold only its own part of the masters?"""
    return isinstance(drafter.norm.weight, DTensor)


def mine(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be shared out."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_host(part: Tensor, original: Tensor, mesh: DeviceMesh) -> Tensor:
    """`part`, a copy of `mine(original)` in host memory, as a part of a whole again; `mesh`: of the processes' CPUs."""
    if not isinstance(original, DTensor):
        return part
    return DTensor.from_local(part, mesh, original.placements, run_check=False, shape=original.shape, stride=original.stride())


def piece_of(everything: Tensor, parameter: Tensor) -> Tensor:
    """What of `everything` stands where `parameter` does: this process's piece where it is shared out, else all of it."""
    everything = everything.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return everything
    return distribute_tensor(everything, parameter.device_mesh, parameter.placements, src_data_rank=None)  # each has it all


@torch.no_grad()
def whole_drafter(drafter: Drafter, device: torch.device) -> Drafter:
    """The drafter itself where it is whole and on `device`, else such a copy. Every process must call it."""
    named = dict(drafter.named_parameters())
    if not any(isinstance(parameter, DTensor) for parameter in named.values()) and drafter.norm.weight.device == device:
        return drafter
    with torch.device("meta"):
        copy = Drafter(drafter.shape, dense_attention)
    copy = copy.to_empty(device=device)
    for name, parameter in copy.named_parameters():
        parameter.copy_(whole(named[name].detach()))
    return copy
