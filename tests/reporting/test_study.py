"""Tables, claims and figures of a study, on made-up results."""

import json
from dataclasses import replace

import pytest

from sampled_sae.reporting.claims import (
    Claim,
    claims_table,
    combined,
    goal_table,
    goal_verdicts,
    hypotheses,
    outcome,
    reached,
    verdicts_table,
)
from sampled_sae.reporting.study import Results, Row, Run, best_factor, leading, read_rows
from sampled_sae.reporting.study_answer import answer
from sampled_sae.reporting.study_figures import across, against, forest
from sampled_sae.reporting.study_page import (
    detailed_page,
    detailed_sections,
    difference_table,
    fill_page,
    means_table,
    page_blocks,
    pooled,
    self_table,
    summary_table,
)
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.measures import Column, Table

ROLES = {"batchtopk": "baseline", "good": "variant", "bad": "paper", "same": "variant"}
NOISE = (0.0, 0.0002, -0.0001)
FVU = {"batchtopk": 0.066, "good": 0.060, "bad": 0.080, "same": 0.066}
PROBING = {"batchtopk": 0.70, "good": 0.76, "bad": 0.60, "same": 0.70}
UNITS = {"a1": "a", "a2": "a", "b": "b", "c": "c", "d": "d"}


def rows(setting="first", scale=1.0):
    """Three seeds of four methods; methods differ from BatchTopK by `scale` times the numbers above."""
    found = []
    for i, method in enumerate(ROLES):
        for seed in range(3):
            wobble = NOISE[seed] + NOISE[(seed + i) % 3] / 5
            fvu = FVU["batchtopk"] + scale * (FVU[method] - FVU["batchtopk"]) + wobble
            core = {"fvu": fvu, "ce_recovered": 1 - fvu / 10}
            run = Run(setting, method, 1.0, seed)
            found += [Row(run, measure, core, {}) for measure in ("select", "core")]
            units = {}
            for j, (unit, source) in enumerate(UNITS.items()):
                value = 0.7 + scale * (PROBING[method] - 0.7) + 0.02 * j + ((seed + i * j) % 3) / 1000
                units[unit] = (source, {"probing_1": value, "probing_5": value + 0.05})
            mean = sum(values["probing_1"] for _, values in units.values()) / len(units)
            found.append(Row(run, "probing", {"probing_1": mean, "probing_5": mean + 0.05}, units))
            letters = {x: ("", {"absorption": 0.1 + fvu + k / 100, "absorption_f1": 0.4}) for k, x in enumerate("stu")}
            found.append(Row(run, "absorption", {"absorption": 0.11 + fvu}, letters))
    return found


@pytest.fixture
def results():
    return Results([*rows(), *rows("second", 0.5)], {"first": "m", "second": "m"})


def claim(method, expect, metric="fvu"):
    return Claim("H1", "a claim", metric, method, expect)


def decided(results, claim):
    return outcome(results, claim).outcome


def test_differences_are_paired_and_judged(results):
    table = difference_table(results, "first", "fvu")
    by_method = {row[0]: row for row in table.rows}
    assert list(by_method) == ["good", "bad", "same"]
    assert by_method["good"][1] == pytest.approx(0.006, abs=1e-4) and by_method["good"][-1] == "better"
    assert by_method["bad"][-1] == "worse" and by_method["same"][-1] == "not worse"
    assert by_method["good"][5:7] == [3, 3]
    probing = {row[0]: row for row in difference_table(results, "first", "probing_1").rows}
    assert probing["good"][-1] == "better" and probing["good"][5:7] == [3, 15]
    low, high = probing["good"][7].split(" to ")
    assert 0.05 < float(low) <= round(probing["good"][1], 4) <= float(high) < 0.07 and by_method["good"][7] == "-"
    (it, _), keys = results.difference("first", "good", "batchtopk", "probing_1"), UNITS
    assert it.clusters == (3, len(set(keys.values())))


def test_claims(results):
    assert decided(results, claim("good", "better")) == "supported"
    assert decided(results, claim("bad", "better")) == "refuted"
    assert decided(results, claim("same", "not worse")) == "supported"
    assert decided(results, claim("same", "better")) == "undecided"
    assert decided(results, claim("absent", "better")) == "not measured"
    first = Results(rows(), {"first": "m"})
    assert decided(first, replace(claim("good", "better", "probing_1"), ratio=1.05)) == "supported"
    assert decided(results, replace(claim("good", "better", "probing_1"), ratio=1.05)) == "mixed", "less in the second"
    assert decided(results, replace(claim("good", "better", "probing_1"), ratio=2)) == "refuted"
    turned = Results([*rows(), *rows("second", -1)], {"first": "m", "second": "m"})
    assert decided(turned, claim("good", "better")) == decided(turned, claim("bad", "better")) == "mixed"
    others = [*rows("first", 0), *rows("second"), *rows("third", -1)]
    undecided = Results(others, dict.fromkeys(("first", "second", "third"), "m"))
    assert decided(undecided, claim("good", "better")) == "mixed", "the first decides nothing, the others contradict"
    table = claims_table(results, [claim("good", "better"), claim("absent", "worse")])
    assert table.rows[0][2] == "supported" and table.rows[0][-2] == 2 and table.rows[1][2] == "not measured"


def test_what_is_claimed_of_one_method_holds_jointly():
    there = Results(rows(), {"first": "m"})
    both = [claim("good", "better"), claim("good", "worse", "probing_1")]
    assert hypotheses(there, both, {}) == {both[0].name: "refuted"}, "better in FVU, but not worse in probing"
    both = [claim("good", "better"), claim("same", "better"), claim("same", "not worse", "absorption")]
    assert hypotheses(there, both, {}) == {both[0].name: "undecided"}
    assert hypotheses(there, [claim("good", "better"), claim("bad", "better")], {}) == {both[0].name: "mixed"}


def test_a_single_seed_decides_no_claim():
    single = [row for row in rows() if row.run.method != "good" or row.run.seed == 0]
    alone = Results(single, {"first": "m"})
    assert decided(alone, claim("good", "better")) == "undecided"
    there = Results([*single, *rows("second")], {"first": "m", "second": "m"})
    tested = outcome(there, claim("good", "better"))
    assert (tested.outcome, tested.setting, tested.settings) == ("supported", "second", 1)
    table = claims_table(there, [claim("good", "better"), claim("bad", "worse")])
    assert [row[0] for row in table.rows] == ["good in second against batchtopk", "bad against batchtopk"]


def test_claims_about_several_methods(results):
    def over(kind, *methods, metrics=("fvu", "probing_5")):
        return decided(results, Claim("H7", "", kind=kind, methods=methods, metrics=metrics))

    assert over("dominated", "bad", "good") == "supported" and over("dominated", "bad") == "refuted"
    assert over("dominated", "same") == "undecided" and over("dominated", "absent") == "not measured"
    assert over("front", "bad", "good") == "refuted" and over("front", "bad") == "supported"
    assert over("no best") == "refuted", "good is the best"
    assert decided(Results([], {}), Claim("H7", "", kind="no best")) == "not measured"
    limits = [decided(results, Claim("H2", "", "fvu", "bad", kind="at most", ratio=r)) for r in (1.1, 1.9)]
    assert limits == ["refuted", "supported"]


def test_dense_latents_are_compared_by_their_ratio():
    dense = {"batchtopk": (0.001, 0.0011, 0.0012), "l2": (0.003, 0.0032, 0.0037)}
    found = [
        Row(Run("first", method, 1.0, seed), "core", {"over_10_percent": value, "l0": 60 + 2 * (method == "l2")}, {})
        for method, values in dense.items()
        for seed, value in enumerate(values)
    ]
    there = Results(found, {"first": "m"})
    it, verdict = there.difference("first", "l2", "batchtopk", "over_10_percent")
    assert it.mean == pytest.approx(1.58, abs=0.02) and verdict == "better"
    assert decided(there, Claim("H1", "", "over_10_percent", "l2", ratio=2)) == "supported"
    assert decided(there, Claim("H1", "", "over_10_percent", "l2", ratio=3.2)) == "undecided"
    assert decided(there, Claim("H1", "", "over_10_percent", "l2", ratio=4)) == "refuted", "its interval ends below 4"
    table = claims_table(there, [Claim("H1", "", "over_10_percent", "l2", ratio=2)])
    assert str(table.rows[0][3]).startswith("x 3.00 (x ")
    assert there.unequal_l0("first", "l2", "batchtopk") == pytest.approx(1 / 30)


def test_synthetic_results_decide():
    saes = [{"label": "BatchTopK", "fve_heldout_threshold": value, "fve_train": 0.995} for value in (0.6, 0.7)]
    asked = Claim("H16", "", method="BatchTopK", kind="synthetic", ratio=0.99)
    found = outcome(Results([], {}), asked, {"finite": {"train": {"samples": 10_000}, "saes": saes}})
    assert found.outcome == "refuted" and "0.6500 on fresh, 0.9950 on training" in found.detail
    endless = {"table": {"train": {"samples": None}, "saes": saes}}
    assert outcome(Results([], {}), asked, endless).outcome == "not measured"


def test_hypotheses_combine_their_claims(results):
    assert combined(["supported"] * 2) == combined(["supported", "supported", "refuted"], "most") == "supported"
    assert combined(["supported", "refuted"]) == "mixed" and combined(["refuted", "refuted"]) == "refuted"
    assert combined(["supported", "undecided"]) == "undecided" and combined(["not measured"]) == "not measured"
    assert combined(["refuted", "not measured"]) == "refuted"
    claims = [claim("good", "better"), claim("bad", "better"), replace(claim("same", "not worse"), name="H2")]
    assert hypotheses(results, claims, {}) == {"H1": "mixed", "H2": "supported"}
    rows = verdicts_table(results, claims, {}, details="all.md").splitlines()[2:4]
    assert [row.split(" | ")[2] for row in rows] == ["mixed", "supported"]
    assert "*FVU*<br>good: x 0.91 (0.9" in rows[0] and "<br>bad: x 1.21 (1.2" in rows[0], "FVU is shown as a ratio"
    assert rows[0].startswith("| [H1](all.md#h1) | a claim |") and rows[0].endswith("| 3 | 2 |")
    rows = verdicts_table(results, [claim("good", "better", "probing_1")], {}).splitlines()
    assert "*probing, k = 1*<br>good: 0.060 (0.0" in rows[2]


def test_the_answer(results):
    claims = [claim("good", "better"), replace(claim("good", "worse"), name="H2")]
    first, instead, _, third, undecided = answer(results, claims, {}, ROLES).splitlines()
    assert first == "1. **Should I use Sampled-SAE?** Yes: `good` reached the [goal](#the-goal)."
    assert "On m (`first`): `good` (FVU 0.0600). No other method" in instead
    assert "Supported (1 of 2): H1 (a claim). Refuted (1 of 2): H2 (a claim)." in third
    assert "24 SAEs in 2 settings, with 3 seeds" in undecided
    worse = Results([row for row in rows() if row.run.method != "good"], {"first": "m"})
    text = answer(worse, [], {}, ROLES)
    assert "No variant reached the [goal](#the-goal). In `first`, 1 of the 2 variants with several seeds " in text
    assert "None is better in any metric of the goal." in text
    assert "On m (`first`): `batchtopk` (FVU 0.0660) and `same` (FVU 0.0660)." in text
    better = Results([row for row in rows() if row.run.method != "good" or row.measure == "core"], {"first": "m"})
    assert "Better than it in some metric: `good` (FVU, CE loss recovered)." in answer(better, [], {}, ROLES)
    part = Results([row for row in rows() if row.measure != "absorption"], {"first": "m"})
    assert "On m (`first`; absorption not measured): `good` (FVU 0.0600)." in answer(part, [], {}, ROLES)
    assert answer(Results([], {}), [], {}, ROLES) == "Not run yet: there are no results."


def test_the_cost_is_that_of_the_papers_pools():
    timed = [row._replace(values=row.values | {"seconds": 20.0 if row.run.method == "bad" else 10.0}) for row in rows()]
    line = answer(Results(timed, {"first": "m"}), [], {}, ROLES).splitlines()[2]
    assert line.endswith(
        "`batchtopk` trains in 10.0 s. The paper's pools take 2.00 to 2.00 times as long. "
        "The one with the lowest FVU, `bad`, has 1.21 times `batchtopk`'s FVU."
    )


def test_the_goal_is_decided_in_one_setting_per_model(results):
    assert results.goals == ["first"] and reached(results, ["same", "bad", "good"], ["batchtopk"]) == ["good"]
    assert reached(results, ["good"], ["batchtopk", "absent"]) == [], "all baselines are needed"
    core = [row for row in rows("second") if row.measure == "core"]
    other_k = Results([*rows(), *core], {"first": "m", "second": "m"})
    assert reached(other_k, ["good"], ["batchtopk"]) == ["good"], "a further setting of the same model"
    other_model = Results([*rows(), *core], {"first": "m", "second": "n"})
    assert other_model.goals == ["first", "second"] and reached(other_model, ["good"], ["batchtopk"]) == []


def test_the_goal_counts_adjusted_gains_of_leaders_alone():
    slightly, methods = Results(rows("first", 0.06), {"first": "m"}), ["good", "bad", "same"]
    found = {key: it for key, it in goal_verdicts(slightly, methods, ["batchtopk"]).items() if key[1] == "good"}
    assert {verdict for verdict, _ in found.values()} == {"better"} and min(p for _, p in found.values()) > 0.05
    assert reached(slightly, methods, ["batchtopk"]) == []
    ahead = []  # one seed of three methods that are ahead of `good`, which has three
    for row in (row for row in rows() if (row.run.method, row.run.seed) == ("good", 0)):
        values = {k: v / 2 if k in ("fvu", "absorption") else v * 1.1 for k, v in row.values.items()}
        ahead += [Row(row.run._replace(method=f"other {i}"), row.measure, values, row.units) for i in range(3)]
    roles = ROLES | {f"other {i}": "variant" for i in range(3)}
    assert "good" not in leading([*rows(), *ahead], roles)
    assert "There is no reason to." in answer(Results([*rows(), *ahead], {"first": "m"}), [], {}, roles)


def test_seeds_of_one_method_do_not_differ():
    many = [row._replace(run=row.run._replace(seed=row.run.seed + more)) for more in (0, 3) for row in rows()]
    table = self_table(Results(many, {"first": "m"}), "first")
    fvu = next(row for row in table.rows if row[0] == "FVU")
    assert fvu[1] == 15 * 6 and fvu[1] == sum(fvu[2:5])


def test_one_seed_decides_nothing():
    alone = Results([row for row in rows() if row.run.seed == 0], {"first": "m"})
    assert {row[-1] for metric in ("fvu", "probing_1") for row in difference_table(alone, "first", metric).rows} == {
        "undecided"
    }
    assert decided(alone, claim("good", "better")) == "undecided"


def test_settings_of_a_model_are_pooled():
    """Pairs stay within their setting, a seed of another setting is another cluster, and rates are the best ones."""
    second = [row for row in rows("second", 0.5) if row.run.method != "same" or row.measure == "absorption"]
    worse_rate = [
        Row(row.run._replace(factor=2.0), row.measure, {name: value + 1 for name, value in row.values.items()}, {})
        for row in second
    ]
    other = rows("third", -1)
    models = {"first": "m", "second": "m", "third": "n"}
    joint = pooled(Results([*rows(), *second, *worse_rate, *other], models), "m")
    with_probing = [method for method in joint.methods("m") if joint.measured("m", method, "probing_1")]
    assert with_probing == ["batchtopk", "good", "bad"], "the other was measured in one setting"
    assert len(joint.measured("m", "same", "absorption")) == 6 * 3
    it, verdict = joint.difference("m", "good", "batchtopk", "probing_1")
    apart = [Results(rows(), models).difference("first", "good", "batchtopk", "probing_1")[0].mean]
    apart.append(Results(second, models).difference("second", "good", "batchtopk", "probing_1")[0].mean)
    assert it.mean == pytest.approx(sum(apart) / 2)
    assert it.clusters == (6, 4) and it.pairs == 30 and verdict == "better"
    assert not pooled(Results(rows(), models), "m").rows, "one setting is no pool"


def test_leaders_and_goal(results):
    assert leading(results.rows, ROLES) == ["good", "same", "bad"]
    assert leading([], ROLES) == []
    table = goal_table(results, ["good"], ["batchtopk"])
    assert [row[:3] for row in table.rows] == [["first", "good", "batchtopk"], ["second", "good", "batchtopk"]]
    assert table.rows[0][3] == "better (p < 0.001)"
    full, means = summary_table(results, "first"), means_table(results, "first")
    assert full.rows[0][:3] == means.rows[0][:3] == ["batchtopk", "x 1", 3]
    assert means.rows[0][3] == full.rows[0][3].mean and "range" in full.note and "range" not in means.note


def test_the_best_rate_is_that_of_the_selection_text():
    def tried(factor, fvu, setting="first", measure="select"):
        return Row(Run(setting, "good", factor, 0), measure, {"fvu": fvu}, {})

    own = [tried(0.5, 0.07), tried(1.0, 0.06), tried(2.0, 0.08), tried(2.0, 0.01, measure="core")]
    models = {"first": "m", "second": "m", "third": "other"}
    assert best_factor(own, "first", "good", models) == best_factor(own, "second", "good", models) == 1.0
    assert best_factor([*own, tried(2.0, 0.09, "second")], "second", "good", models) == 2.0
    assert best_factor([tried(2.0, 0.09)], "third", "good", models) == 1.0


def test_a_methods_own_rates_come_before_those_it_shares():
    def rate(setting, method, *fvus):
        return [
            Row(Run(setting, method, factor, 0), "rate", {"fvu": fvu}, {})
            for factor, fvu in zip((0.5, 1.0, 2.0), fvus, strict=True)
        ]

    models = {"first": "m", "second": "n"}
    shared = [*rate("first", "l30", 0.3, 0.2, 0.1), *rate("second", "l100", 0.1, 0.2, 0.3)]
    assert best_factor(shared, "first", "l100", models, "l30") == 2.0
    assert best_factor(shared, "second", "l100", models, "l30") == 0.5
    core = [
        Row(Run("first", "l100", factor, seed), "core", {"fvu": factor, "l0": 60 * factor, "seconds": factor}, {})
        for factor in (1.0, 2.0)
        for seed in range(3)
    ]
    results = Results([*shared, *(row for row in core if row.run.factor == 2)], models, rate_of={"l100": "l30"})
    assert results.best("first", "l100") == 2.0 and results.at_end("first", "l100")
    assert set(results.measured("first", "l100", "fvu").values()) == {2.0}
    assert results.unequal_l0("first", "l100", "l100") == 0 and not results.at_end("second", "l30")
    assert summary_table(results, "first").rows[0][1] == "x 2*"
    assert results.not_run("first", "l100") is None and results.not_run("second", "l100") is None
    lower = Results([*shared, *(row for row in core if row.run.factor == 1)], models, rate_of={"l100": "l30"})
    table = summary_table(lower, "first")  # the shared rates are best at 2
    assert table.rows[0][1] == "x 1†" and "not run at full length: l100 x 2." in table.note


def test_trainings_of_full_length_come_before_short_ones():
    def row(factor, seed, measure, **values):
        return Row(Run("first", "l100", factor, seed), measure, values, {})

    models = {"first": "m"}
    short = [row(factor, 0, "rate", fvu=fvu) for factor, fvu in ((1.0, 0.3), (2.0, 0.2), (4.0, 0.1))]
    core = [row(factor, seed, "core", fvu=fvu) for factor, fvu in ((2.0, 0.5), (4.0, 0.6)) for seed in range(3)]
    uneven = row(4.0, 3, "core", fvu=0.0)  # a seed that the other factor does not have
    assert best_factor([*short, core[0]], "first", "l100", models) == 4.0  # one factor at full length decides nothing
    assert best_factor([*short, *core, uneven], "first", "l100", models) == 2.0
    selected = [row(2.0, 0, "select", fvu=0.5)]
    assert best_factor([*short, *core, *selected], "first", "l100", models) == 2.0  # only one has the selection text
    selected += [row(4.0, 0, "select", fvu=0.4)]
    assert best_factor([*short, *core, *selected], "first", "l100", models) == 4.0


def test_a_rate_that_diverged_is_not_the_best():
    def row(factor, measure, **values):
        return [Row(Run("first", "l100", factor, seed), measure, values, {}) for seed in range(3)]

    short = [*row(2.0, "rate", fvu=0.2), *row(4.0, "rate", fvu=0.1), *row(8.0, "rate", diverged=1.0)]
    whole = [*row(2.0, "core", fvu=0.5), *row(4.0, "core", diverged=1.0)]
    results = Results([*short, *whole], {"first": "m"})
    assert best_factor(results.rows, "first", "l100", results.models) == results.best("first", "l100") == 2.0
    assert set(results.measured("first", "l100", "fvu").values()) == {0.5}
    assert results.not_run("first", "l100") is None


def test_marks_of_a_method_are_explained_and_those_of_its_own_rate():
    def row(method, factor, measure, **values):
        return [Row(Run("first", method, factor, seed), measure, values, {}) for seed in range(3)]

    rows = [*row("batchtopk", 1.0, "core", fvu=0.3, l0=60.0), *row("batchtopk", 2.0, "core", fvu=0.4, l0=60.0)]
    rows += [*row("l100", 1.0, "core", fvu=0.5, l0=60.0), *row("l100", 2.0, "core", fvu=0.4, l0=70.0)]
    rows += [*row("l100", 4.0, "rate", fvu=0.1), *row("l100", 2.0, "rate", fvu=0.2)]
    results = Results(rows, {"first": "m"})
    table = summary_table(results, "first")
    assert table.rows[1][1] == "x 2*†" and " *: the best of those tried" in table.note and " †: " in table.note
    tables_of = [difference_table(results, "first", "fvu", **how) for how in ({}, {"factor": 1.0}, {"factor": 2.0})]
    assert [table.rows[0][0] for table in tables_of] == ["l100*", "l100", "l100*"]


def test_a_metric_without_the_best_rate_is_taken_from_another_and_marked():
    def row(method, factor, measure, **values):
        return [Row(Run("first", method, factor, seed), measure, values, {}) for seed in range(3)]

    rows = [*row("l100", 2.0, "core", fvu=0.5), *row("l100", 4.0, "core", fvu=0.6), *row("l100", 8.0, "core", fvu=0.7)]
    rows += [*row("l100", 8.0, "similarity", mmcs_seeds=0.1), *row("l100", 4.0, "similarity", mmcs_seeds=0.2)]
    rows += [*row("batchtopk", 1.0, "core", fvu=0.4), *row("batchtopk", 1.0, "similarity", mmcs_seeds=0.3)]
    results = Results(rows, {"first": "m"})
    assert set(results.measured("first", "l100", "mmcs_seeds").values()) == {0.2}
    assert results.other_rates("first", "l100", ["fvu", "mmcs_seeds", "found_seeds"]) == {"MMCS across seeds": 4.0}
    assert results.other_rates("first", "batchtopk", ["fvu", "mmcs_seeds", "autointerp"]) == {}
    table = summary_table(results, "first", ["fvu", "mmcs_seeds"])
    assert table.rows[0][1] == "x 2" and "another rate: l100 x 4: MMCS across seeds." in table.note
    claim = Claim("H", "agrees", "mmcs_seeds", "l100", "worse")
    assert claims_table(results, [claim]).rows[0][0] == "l100 (lr x 4) against batchtopk"


def test_lines_are_read_back(tmp_path):
    path = tmp_path / "results.jsonl"
    plain = [{**row.run._asdict(), "measure": row.measure, "values": row.values, "units": row.units} for row in rows()]
    newer = {**plain[0], "values": {"fvu": 1.0}}
    path.write_text("".join(json.dumps(line) + "\n" for line in [*plain, newer]) + '{"setting": "fi')
    found = read_rows(path)
    assert len(found) == len(plain) and found[0].values == {"fvu": 1.0} and found[1:] == rows()[1:]
    path.write_text("nothing\n" + json.dumps(plain[0]) + "\n")
    with pytest.raises(UserError, match=r"results.jsonl: line 1 is no result of a study"):
        read_rows(path)
    assert read_rows(tmp_path / "none.jsonl") == []


def test_the_page_keeps_its_text(tmp_path, results):
    page = tmp_path / "results.md"
    page.write_text("# Answer\n\n<!-- begin claims -->\nstale\n<!-- end claims -->\n\nMore text.\n")
    made = page_blocks(results, [claim("good", "better")], ROLES)
    added = fill_page(page, made)
    text = page.read_text()
    assert added == ["answer", "goal", "power", "summary-first"] and "stale" not in text
    assert text.index("# Answer") < text.index("| [H1](") < text.index("More text.") < text.index("summary-first")
    assert fill_page(page, made) == [] and page.read_text() == text
    fill_page(page, [Table([Column("a")], [["\\1 new"]], "claims")])
    assert "1 new" in page.read_text() and "| [H1](" not in page.read_text()
    fill_page(tmp_path / "new.md", made)
    text = (tmp_path / "new.md").read_text()
    assert text.index("1. **Should I") < text.index("## Claims") < text.index("| [H1](") < text.index("summary-first")


def test_the_page_of_all_tables(results):
    text = detailed_page(detailed_sections(results, [claim("good", "better")], ROLES))
    assert "- [first](#first)" in text and "\n## first\n" in text and "### H1\n\n| comparison |" in text
    assert "### first: FVU\n\n| method |" in text and "### second: Absorption by unit\n\n| letter |" in text
    assert "### first: FVU, all with the default learning rate" in text and "Autointerp" not in text, "not measured"


def test_the_figure_has_a_point_per_method(results):
    figure = forest(results, "first", "fvu")
    assert list(figure.data[0].y) == ["good", "bad", "same"]
    assert 2 ** figure.data[0].x[0] == pytest.approx(0.060 / 0.066, abs=1e-3), "FVU is shown as a ratio"
    assert {"0.9", "1", "1.2"} <= {*figure.layout.xaxis.ticktext}
    assert forest(results, "first", "probing_5").data[0].x[0] == pytest.approx(0.06, abs=1e-3)
    best, points, named = against(results, "first", "fvu", "probing_5").data
    assert list(best.x) == [points.x[1]] and points.y[1] == pytest.approx(0.76 + 0.09, abs=0.002)
    assert len(points.x) == len(ROLES) and set(named.text) <= set(ROLES)
    assert against(results, "first", "fvu", "autointerp") is None
    odd = [Run("first", "odd", 1.0, seed) for seed in (0, 1)]
    distant = [Row(run, "core", {"fvu": 9.0}, {}) for run in odd]
    distant += [Row(run, "probing", {"probing_5": 0.7}, {"d": ("", {"probing_5": 0.7})}) for run in odd]
    figure = against(Results([*rows(), *distant], {"first": "m"}), "first", "fvu", "probing_5")
    assert len(figure.data[1].x) == len(ROLES) and figure.layout.xaxis.title.text.endswith("above 0.2: odd")
    once = Results([*rows(), *(row for row in distant if row.run.seed == 0)], {"first": "m"})
    assert "odd" not in against(once, "first", "fvu", "probing_5").layout.xaxis.title.text, "a single seed"
    single = Results([row for row in rows() if row.run.seed == 0], {"first": "m"})
    assert forest(single, "first", "fvu") is None
    assert len(against(single, "first", "fvu", "probing_5").data[1].x) == len(ROLES), "all have one"


def test_a_figure_over_all_settings():
    names = ("first", "second", "third")
    there = Results([row for name in names for row in rows(name)], dict.fromkeys(names, "m"))
    figure = across(there, "fvu")
    assert [trace.name for trace in figure.data] == list(names)
    assert list(figure.data[0].y) == ["good", "bad", "same"] and figure.data[0].x[0] < 0 < figure.data[0].x[1]
    two = Results([row for name in names[:2] for row in rows(name)], dict.fromkeys(names, "m"))
    assert across(two, "fvu") is None, "a method has to be in three settings"
