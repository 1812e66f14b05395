"""Replaces a graph's norms and Linear layers by calls of the op family.

A norm is rewritten as a whole or not at all: all calls are added to the graph in addition to the
nodes that they replace, their results are compared with these, and only then replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from fused_norm.models.activations import Activated, find_activated, with_second
from fused_norm.models.calls import CALLS, FusedCall, Left, Rewritten
from fused_norm.models.costs import bytes_written, count_ops
from fused_norm.models.emit import Emitter
from fused_norm.models.emit_call import emit_call
from fused_norm.models.flow import Flow
from fused_norm.models.forms import above, form
from fused_norm.models.forms import name as name_of
from fused_norm.models.norms import Norm
from fused_norm.models.output_parts import find_parts
from fused_norm.models.place import place_of
from fused_norm.models.precision import Precision
from fused_norm.models.readers import Readers, Reading, residual_of
from fused_norm.models.timing import Replaced, cut_out
from fused_norm.models.values import (
    are_laid_out_alike,
    dtype,
    is_plain,
    is_sharded,
    is_tensor,
    value,
)
from fused_norm.models.views import is_permutation

# Above this many layers, the norm runs alone and its layers multiply separately.
_MOST_PRODUCTS = 8
# Steps that can be left out: at most this many after the norm, those before it in the last one.
_MOST_SIMPLER = 4


@dataclass
class Rewriter:
    """Rewrites the norms of one graph, one after another.

    Attributes:
        emitter: Adds nodes to the graph.
        keeps_rounding: Whether the model's intermediate rounding is kept.
        is_summed_by_norm: Called with a sum; returns whether a norm that is to be fused reads it.
        sums: Sums that the product before them should add, rather than a norm; the rewriter takes
            out those whose product becomes part of a call that cannot.
        precision: Which Linear layers are in FP8.
        gated: Linear layers with a gate on their results, which calls of their own multiply by it.
        replaced: Receives copies of the old and the new nodes, to be timed; None for no copies.
    """

    emitter: Emitter
    keeps_rounding: bool = False
    is_summed_by_norm: Callable[[Node], bool] = lambda total: False
    sums: set[Node] = field(default_factory=set)
    precision: Precision = field(default_factory=Precision)
    gated: set[Node] = field(default_factory=set)
    replaced: list[Replaced] | None = None

    @property
    def flow(self) -> Flow:
        """What is known of the graph."""
        return self.emitter.flow

    def rewrite(self, norm: Norm, readers: Readers) -> Rewritten:
        """Emit calls that replace a norm and all its readers, and return what changed.

        Args:
            norm: The norm.
            readers: Its readers.

        Raises:
            Left: If it cannot be rewritten, or should not be. The graph is unchanged.
        """
        for less in range(_MOST_SIMPLER + 1):
            try:
                calls, dead, swaps = self._try(norm, readers, less)
                break
            except Left:
                # If a whole call fits nowhere, a part of it may fit.
                if less == _MOST_SIMPLER:
                    raise
        copies = None
        if self.replaced is not None:
            copies = cut_out(self.flow, dead, self.emitter.made, swaps)
            self.replaced.append(copies)
        gone = self._swap(norm, readers, calls, swaps, dead)
        launches = sum(call.launches() for call in calls)
        new = [node for node in self.emitter.made if node.target not in CALLS]
        saved = bytes_written(gone) - bytes_written(new)
        after = count_ops(new) - len(calls) + launches
        return Rewritten(calls, saved, count_ops(gone), after, copies)

    def _try(
        self, norm: Norm, readers: Readers, less: int
    ) -> tuple[list[FusedCall], set[Node], list[tuple[Node, Node]]]:
        """Emit calls into the graph; return them, the replaced nodes, and the result for each."""
        calls = self._calls(norm, readers, less)
        dead = _replaced(norm, calls)
        self.emitter.made.clear()
        swaps: list[tuple[Node, Node]] = []
        x = norm.x
        try:
            for call in calls:
                found = self._put(norm, call, x, dead)
                if call.total is not None:
                    x = dict(found).get(call.total[2], x)
                swaps += found
        except Left:
            self.emitter.forget()
            raise
        except Exception as error:
            # The calls run on fake tensors, where an op may raise any error: then this norm stays
            # unchanged.
            self.emitter.forget()
            raise Left(f"{type(error).__name__}: {error}") from error
        return calls, dead, swaps

    def _calls(self, norm: Norm, readers: Readers, less: int) -> list[FusedCall]:
        """Return the calls for a norm and its readers; `less` is the number of omitted steps."""
        low = dtype(norm.out).itemsize < 4
        if self.keeps_rounding and norm.is_rounded:
            raise Left("rounded between the norm and its weight, or within it")
        calls = []
        for reading in readers.readings:
            self._check(norm, reading)
            if self.keeps_rounding and low and reading.modulation is not None:
                raise Left("rounded between the norm and its modulation")
            if self.keeps_rounding and reading.is_rounded:
                raise Left("rounded between the norm and its Linear layers")
            call = FusedCall(reading)
            if not (self.keeps_rounding and low):
                call.activated = self._activated(norm, reading)
            calls.append(call)
        first = calls[0]
        if less < _MOST_SIMPLER and not any(call.reading.views for call in calls):
            first.total = self._total(norm)
        activated = first.activated
        own = None if first.total is None else first.total[2]
        if activated is not None and own is not None and above(activated.residual) is own:
            # A call cannot add the sum that it computes itself; the norm after it can.
            first.activated = activated.simpler
            self.sums.discard(activated.out)
        for call in calls:
            for _ in range(less):
                call.activated = call.activated and call.activated.simpler
            products = call.products()
            # A call that fits nowhere returns its output as a whole.
            if less == 0 and call.activated is None and len(products) == 1:
                is_modulated = call.reading.modulation is not None
                recipe = self.precision.of_call(products)[0]
                call.parts = find_parts(products[0], norm.x, is_modulated, recipe, self.flow)
        if first.total is not None:
            gone = _replaced(norm, calls)
            first.returns_sum = len(calls) > 1 or any(u not in gone for u in first.total[2].users)
        if others := self._others(norm, readers, calls):
            self._expose(norm, others, calls)
        return calls

    @staticmethod
    def _like(norm: Norm, calls: Iterable[FusedCall]) -> Node | None:
        """Return a node shaped like the normalized rows that stays in the graph, or None."""
        totals = [call.total for call in calls if call.total is not None]
        candidates = totals[0][:2] if totals else (norm.x,)
        return next((node for node in candidates if are_laid_out_alike(node, norm.out)), None)

    def _others(
        self, norm: Norm, readers: Readers, calls: Iterable[FusedCall]
    ) -> list[tuple[Node, Node]]:
        """Return the readers of the normalized rows themselves, each with its rows."""
        if self._like(norm, calls) is not None:
            return readers.others
        return readers.others + [(user, source) for user, source, _ in readers.shapes]

    def _check(self, norm: Norm, reading: Reading) -> None:
        products = reading.products
        if len(products) > _MOST_PRODUCTS:
            raise Left(f"{len(products)} Linear layers, for which normalizing once is cheaper")
        nodes = [norm.anchor, *reading.inner, *(p.node for p in products)]
        if not self.flow.are_under_same_modes(nodes):
            raise Left("autocast or the recording of gradients changes between norm and Linear")
        m = reading.modulation
        if m is not None and any(view > m.start for view in reading.views):
            raise Left("a view is between the modulation and the Linear layer")
        self._check_types(norm, reading)

    @staticmethod
    def _check_types(norm: Norm, reading: Reading) -> None:
        """Refuse integers, and subclasses of tensors except DTensors that belong together."""
        m = reading.modulation
        norms = [norm.x, norm.gamma, norm.beta, *((m.scale, m.shift) if m else ())]
        if any(is_tensor(v) and not value(v).is_floating_point() for v in norms):
            raise Left("rows are multiplied by integers or a mask, or these are added")
        linears = [v for p in reading.products for v in (p.weight, p.bias)]
        # An FP8 weight was checked when its layer was recognized.
        taken = {p.weight for p in reading.products if p.recipe is not None}
        for node in {*norms, *linears} - taken:
            if not (is_plain(value(node)) or is_sharded(value(node))):
                raise Left(f"weight is a subclass: {type(value(node)).__name__}")
        entries = [view for view in reading.views if form(view).kind == "from_local"]
        of_norm, of_linears = (
            {is_sharded(value(node)) for node in nodes if is_tensor(node)}
            for nodes in (norms, linears)
        )
        if len(of_norm) > 1 or of_linears != ({True} if entries else of_norm):
            raise Left("weight is a subclass: DTensor, among plain tensors")
        for view in entries:
            if not all(place.is_replicate() for place in value(view).placements):
                raise Left("the norm is computed of this process's rows: its gradients are local")

    def _activated(self, norm: Norm, reading: Reading) -> Activated | None:
        products = reading.products
        found = find_activated(products)
        if found is None or not self.flow.are_under_same_modes([norm.anchor, *found.inner]):
            return None
        more = with_second(found, self._adds)
        if more.second is not None and more.second.node in self.gated:
            return found
        is_same = self.flow.are_under_same_modes([norm.anchor, *more.inner])
        return more if is_same else found

    def _adds(self, total: Node) -> bool:
        """Return whether a call may end in a sum: if no norm would benefit more from adding it."""
        return total in self.sums or not self.is_summed_by_norm(total)

    def _expose(self, norm: Norm, others: list[tuple[Node, Node]], calls: list[FusedCall]) -> None:
        """Let one call also return the normalized rows for other readers."""
        rows = {source for _, source in others}
        if self.flow.is_written(rows, norm.anchor, but=norm.inner):
            raise Left("the normalized rows are written in place")
        # Copies of the rows stay copies.
        is_one = len({self.flow.reach([source]) for source in rows}) == 1
        wanted = {above(source, casts=False) for source in rows}
        for call in calls:
            reading = call.reading
            is_turned = reading.modulation is None and all(map(is_permutation, reading.views))
            for node in (reading.source, *([norm.out] if is_turned else [])):
                if is_one and wanted == {above(node, casts=False)}:
                    call.norm = node
                    return
        kinds = sorted({name_of(user) for user, _ in others})
        views = sorted({name_of(view) for call in calls for view in call.reading.views})
        raise Left(
            f"output read by more than the Linear layers: {', '.join(kinds)}"
            + (f"; they read what {', '.join(views)} makes of it" if views else "")
        )

    def _total(self, norm: Norm) -> tuple[Node, Node, Node] | None:
        """Return both summands and the node of the sum that a norm reads, if a call may add."""
        found = residual_of(norm.x)
        if found is None:
            return None
        total = found[2]
        if total in self.sums:
            return None
        if self.flow.is_write_seen(total):
            return None
        return found if self.flow.are_under_same_modes([total, norm.anchor]) else None

    def _put(
        self, norm: Norm, call: FusedCall, x: Node, dead: set[Node]
    ) -> list[tuple[Node, Node]]:
        """Emit a call into the graph; return the nodes that it replaces, each with its result."""
        place = place_of(self.flow, norm, call, x, dead)
        call.recipe, call.precision = self.precision.of_call(call.products())
        if call.recipe is not None and self.keeps_rounding and dtype(norm.out).itemsize < 4:
            raise Left("rounded between the norm and its quantization")
        # Not if another call computes x, and replaces it.
        if x is norm.x and self._passes_on(norm, call, place, dead):
            call.passes_on = norm.x
        with self.emitter.graph.inserting_before(place):
            return emit_call(self.emitter, norm, call, x)

    def _passes_on(self, norm: Norm, call: FusedCall, place: Node, dead: set[Node]) -> bool:
        """Return whether readers of a norm's input are to read it through the call.

        Its backward then adds their gradients, for which PyTorch takes a kernel of its own.
        """
        x = norm.x
        is_served = (
            call.total is None
            and call.recipe is None
            and not call.reading.views
            and value(x).requires_grad
            and is_plain(value(x))
            and self.flow.records_gradients(norm.anchor)
            and not self.flow.is_written([x], place)
        )
        readers = [user for user in x.users if user not in dead and _is_followed(user)]
        # A norm that is written out would no longer be found if its nodes read two tensors, as
        # those of another do that shares a reciprocal root with this one.
        is_shared = any(u not in dead for n in norm.inner if n is not norm.out for u in n.users)
        is_before = any(user < place for user in readers)
        return is_served and bool(readers) and not (is_shared or is_before)

    def _swap(
        self,
        norm: Norm,
        readers: Readers,
        calls: list[FusedCall],
        swaps: list[tuple[Node, Node]],
        dead: set[Node],
    ) -> list[Node]:
        """Replace nodes by the results of calls; return the nodes to remove."""
        sources = {call.norm for call in calls if call.norm is not None}
        others = self._others(norm, readers, calls)
        if (like := self._like(norm, calls)) is not None:
            for user, source, between in readers.shapes:
                self._read_shape_of(like, norm, user, source, between)
        for old, new in swaps:
            if old in sources:
                for user, source in others:
                    user.replace_input_with(source, new)
            elif any(old is call.passes_on for call in calls):
                for user in [u for u in old.users if u > new and u not in dead and _is_followed(u)]:
                    user.replace_input_with(old, new)
            else:
                old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in dead)
        gone = []
        for node in sorted(dead, reverse=True):
            if not node.users:
                self.emitter.graph.erase_node(node)
                gone.append(node)
        return gone

    def _read_shape_of(
        self, like: Node, norm: Norm, user: Node, source: Node, between: list[Node]
    ) -> None:
        """Let a reader of a shape use a node shaped like the norm, through the same views."""
        now = {norm.out: like}
        with self.emitter.graph.inserting_before(user):
            for node in between:
                now[node] = self.emitter.graph.node_copy(node, lambda old: now.get(old, old))
                self.flow.add(now[node], user)
        user.replace_input_with(source, now[source])


def _replaced(norm: Norm, calls: Iterable[FusedCall]) -> set[Node]:
    """Return the nodes that calls replace: of a norm's, those that no other node reads.

    A node that stays reads a sum that a call computes from the call. If the sum stayed for it and
    is in place, the call would read a summand that it has overwritten.
    """
    found = norm.inner.union(*(call.inner() for call in calls))
    found = found.union(*(call.parts.inner for call in calls if call.parts is not None))
    for node in sorted(norm.inner - {norm.out}, reverse=True):
        if not found.issuperset(node.users):
            found.remove(node)
    return found


def _is_followed(reader: Node) -> bool:
    """Return whether a gradient may come back from a reader that may read another tensor.

    Results of the graph stay what they are. So does what hooks are registered on and derivatives
    are taken of: they need the whole gradient of a tensor, from all of its readers.
    """
    found, target = value(reader), reader.target
    is_autograds = getattr(target, "__module__", "").startswith("torch.autograd")
    if reader.op == "output" or found is None or isinstance(target, HigherOrderOperator):
        return False
    return not is_autograds and any(
        isinstance(v, Tensor) and v.requires_grad for v in tree_leaves(found)
    )
