"""A plan as text for the terminal: verdict and bars first, then the arithmetic, at most 100 columns wide."""

from __future__ import annotations

import textwrap

from duoka.plan.kernels import kernel_sentences
from duoka.plan.offload import disk_sentence
from duoka.plan.recompute import in_words
from duoka.plan.report import Plan
from duoka.plan.search import WORTH_IT, Candidate
from duoka.plan.shape import ASSUMED
from duoka.units import format_bytes, format_count, format_seconds

WIDTH = 100
_TABLE_NAMES = {"fsdp": "zero3=fsdp"}
_BAR = 40


def plan_lines(plan: Plan) -> list[str]:
    """The plan as `duoka plan` prints it."""
    parts = [
        [_verdict(plan)],
        model_lines(plan),
        layout_lines(plan),
        static_lines(plan),
        peak_lines(plan),
        speed_lines(plan),
    ]
    parts += [ranking_lines(plan), change_lines(plan), note_lines(plan)]
    out: list[str] = []
    for lines in parts:
        if lines:
            out += ["", *lines] if out else lines
    return [part for line in out for part in _wrap(line)]


def verdict_lines(plan: Plan) -> list[str]:
    """The first sentence alone."""
    return _wrap(_verdict(plan))


def _verdict(plan: Plan) -> str:
    step = f"about {format_seconds(plan.speed.step_s)} a step"
    return f"verdict  {plan.verdict}: {plan.memory_sentence()}; {step} as {plan.layout.name}"


def model_lines(plan: Plan) -> list[str]:
    shape, work = plan.work.shape, plan.work
    assumed = shape.exact or shape.model_type == ASSUMED
    how = "counted in its files" if shape.is_counted else "counted like a Llama: this type is not in the table"
    approximate = "" if assumed else f" ({how})"
    head = "tied to the embedding" if shape.tied else f"{format_count(shape.num_head)} in the head"
    kind = "full fine-tuning"
    if work.lora is not None:
        kind = f"LoRA rank {work.lora.rank}, {work.num_trainable / shape.num_parameters:.2%} beside the model"
    if work.train_only is not None:
        kind = f"some layers only, {work.num_trainable / shape.num_parameters:.2%} of the model"
    experts = shape.experts
    mixed = [] if experts is None else [
        f"         a token passes {format_count(shape.num_active)} of them: {experts.num_active} of "
        f"{experts.num_experts} experts in each of {experts.num_layers} layers",
    ]  # fmt: skip
    return [
        f"model    {shape.num_parameters:,} parameters{approximate}: {format_count(shape.num_embedding)} in the "
        f"embedding, {head},",
        f"         {shape.num_layers} layers x {format_count(shape.num_per_layer)} ({shape.model_type})",
        *mixed,
        *([f"         beside these {format_count(shape.num_beside)} that no text reaches"] if shape.num_beside else []),
        f"trained  {work.num_trainable:,} parameters ({kind})",
    ]


def layout_lines(plan: Plan) -> list[str]:
    layout = plan.layout
    rows = [
        ("parallel.strategy", layout.name),
        ("parallel.sequence", str(layout.sp)),
        ("train.precision", layout.precision),
        ("train.recompute", layout.recompute),
        ("train.micro_batch", str(layout.micro)),
    ]
    recompute = in_words(layout.recompute)
    out = [f"layout   {layout.name}, {layout.precision}, recompute {recompute}, micro-batch {layout.micro}"]
    out += [f"         auto: {key} -> {plan.reasons[key]}" for key, _ in rows if key in plan.reasons]
    first, *reasons = kernel_sentences(plan.kernels)
    out += [f"kernels  {first}", *(f"         {reason}" for reason in reasons)]
    out.append(f"batch    {plan.batch.sentence()}{_tokens_per_step(plan)}")
    if plan.steps is not None:
        out.append(f"steps    {plan.steps.sentence(plan.epochs)}")
    if plan.horizon is not None:
        out.append(f"tokens   {plan.horizon.sentence()}")
    return out


def _tokens_per_step(plan: Plan) -> str:
    """A batch of samples in tokens, as papers and guides give it."""
    if plan.batch.global_batch.unit == "tokens":
        return ""
    tokens, lengths = round(plan.speed.tokens_per_step), plan.lengths
    if lengths is None:
        kind = "up to "  # rows as long as they may be
    else:
        kind = "" if tokens == plan.batch.global_batch.count * lengths.longest else "about "
    return f"; {kind}{tokens:,} tokens per step"


def static_lines(plan: Plan) -> list[str]:
    fewest = plan.fewest
    out = [
        f"memory per rank before activations, {plan.layout.precision}, "
        f"N = {plan.layout.dp * plan.layout.sp} (P all, Pt trained parameters)",
        f"  {'strategy':<10}{'weights':>9}{'gradients':>10}{'optimizer':>10}{'total':>9}{'least':>7}  formula",
    ]
    for row in plan.table:
        cells = (row.weights_bytes, row.gradients_bytes, row.optimizer_bytes, row.total_bytes)
        sizes = [format_bytes(cell) for cell in cells]
        mark = "  <- this run" if row.strategy == plan.layout.strategy else ""
        name = _TABLE_NAMES.get(row.strategy, row.strategy)
        least = f"{fewest.get(row.strategy) or 'none':>7}"
        line = f"  {name:<10}{sizes[0]:>9}{sizes[1]:>10}{sizes[2]:>10}{sizes[3]:>9}{least}  {row.formula}"
        out.append(line + mark)
    out.append("  least: ranks that hold it at all, one sample at a time, everything recomputed, nothing offloaded")
    return out


def peak_lines(plan: Plan) -> list[str]:
    """One bar per part against the available memory; the three largest first."""
    memory, available = plan.memory, plan.available_bytes
    out = [
        f"peak     {plan.memory_sentence()}",
        f"         {plan.samples_sentence()}",
        f"         at the {memory.peak_moment}, with {memory.peak_tokens:,} tokens at once:",
    ]
    scale = max(available, memory.peak_bytes, 1)
    before = 0
    for name, size in memory.largest_parts(len(memory.parts)):
        start, end = round(_BAR * before / scale), round(_BAR * (before + size) / scale)
        before += size
        bar = " " * start + "█" * (end - start)
        out.append(f"           {name:<16}{format_bytes(size):>10} {bar}".rstrip())
    mark = min(_BAR, round(_BAR * available / scale))
    full = round(_BAR * memory.peak_bytes / scale)
    gauge = "".join("█" if i < min(full, mark) else "▒" if i < full else "·" if i < mark else " " for i in range(_BAR))
    out.append(f"           {'in all':<16}{format_bytes(memory.peak_bytes):>10} {gauge}| of {format_bytes(available)}")
    by_formula: dict[str, list[str]] = {}
    for name, _ in memory.largest_parts(len(memory.parts)):
        by_formula.setdefault(memory.formulas.get(name, ""), []).append(name)
    out += [f"         {', '.join(names)}: {formula}" for formula, names in by_formula.items() if formula]
    if plan.host.needed_bytes:
        out.append(f"         and {plan.host.sentence()}")
    if plan.disk.needed_bytes:
        out.append(f"disk     {plan.disk.sentence()}")
        out.append(f"         {disk_sentence(plan.disk_moved_bytes, plan.cluster, plan.speed.step_s)}")
    out += [f"         it would fit with {change}" for change in plan.smaller]
    return out


def speed_lines(plan: Plan) -> list[str]:
    speed, costs = plan.speed, plan.costs
    spread = f"{format_seconds(speed.low_s)} to {format_seconds(speed.high_s)}"
    basis = "measured on this machine" if speed.is_measured else f"products at {speed.efficiency:.0%} of the peak"
    out = [
        f"speed    about {format_seconds(speed.step_s)} a step ({spread}), {speed.tokens_per_s:,.0f} tokens/s on "
        f"{plan.cluster.name}",
        f"         MFU {speed.mfu:.1%} by {speed.formula}; {basis}",
        f"         limited by {speed.limit}",
        *(f"         {text}" for text in plan.cluster.notes),
    ]
    if plan.cluster.num_devices > 1:
        out.append(
            f"         efficiency {speed.scaling_efficiency:.1%}: what {plan.cluster.num_devices} devices keep of "
            "their speed without exchange"
        )
    for name, seconds in sorted(speed.parts.items(), key=lambda part: -part[1]):
        share = seconds / speed.step_s
        if share >= 0.005:
            out.append(f"           {name:<16}{format_seconds(seconds):>9} {share:>5.0%}  {'█' * round(30 * share)}")
    for one in speed.exchanges:
        sent = format_bytes(one.sent_bytes)
        out.append(f"         sent per rank and step: {sent} ({one.kind} of {one.what}, {one.times:g} times)")
    return [*out, f"cost     {costs.lines()[0]}", *(f"         {line}" for line in costs.lines()[1:])]


def ranking_lines(plan: Plan) -> list[str]:
    """The best layouts beside this one, and why others are out."""
    if plan.ranking is None or plan.cluster.num_devices == 1:
        return []
    out = [f"layouts  of {plan.cluster.num_devices} devices, from the fastest"]
    for place, one in enumerate(plan.ranking.candidates[:5]):
        out.append(f"  {place + 1}  {_candidate(one)}")
    best = plan.ranking.best()
    if best is not None and best not in plan.ranking.candidates[:5]:
        out.append(f"     {_candidate(best)}")
    if best is not None and best.speed.tokens_per_s > WORTH_IT[plan.work.device] * plan.speed.tokens_per_s:
        name = best.layout.name.replace("·", ".")
        out.append(f"     this plan is of {plan.layout.name}, as asked; the fastest:   parallel.layout={name}")
    if not plan.ranking.candidates:
        out.append("     none is left, each for its reason:")
    shown = {one.reason: one for one in reversed(plan.ranking.rejected)}
    out += [f"     not {one.layout}: {one.reason}" for one in list(shown.values())[::-1][:4]]
    return out


def _candidate(one: Candidate) -> str:
    mark = f"  ({one.mark})" if one.mark else ""
    speed = f"{one.speed.tokens_per_s:>11,.0f} tokens/s  MFU {one.speed.mfu:>5.1%}"
    return f"{one.name:<46}{format_bytes(one.memory.peak_bytes):>9}{speed}{mark}"


def change_lines(plan: Plan) -> list[str]:
    if not plan.changes:
        return []
    now, speed = plan.memory.peak_bytes, plan.speed.tokens_per_s
    lines = [f"  {change.sentence(now, speed)}  {change.mark}".rstrip() for change in plan.changes]
    return ["changes  what each alone would give", *lines]


def note_lines(plan: Plan) -> list[str]:
    return [*(f"note     {text}" for text in plan.notes), *(f"warning  {text}" for text in plan.warnings)]


def _wrap(line: str) -> list[str]:
    """A line of at most WIDTH columns, or several; what follows stands under the text of the first."""
    if len(line) <= WIDTH:
        return [line]
    indent = " " * (13 if line.startswith(" ") else 9)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, drop_whitespace=True) or [""]
