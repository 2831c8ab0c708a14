"""Make a W&B workspace for runs with ds_compress: a chart per quantity, with all boundaries and directions.

    pip install wandb-workspaces
    python launch/wandb_workspace.py ENTITY PROJECT --stages 4

It is saved in the project as a view of its own, for all runs there; the address is printed.
"""

import argparse

import wandb_workspaces.reports.v2 as panels
import wandb_workspaces.workspaces as workspaces

from ds_compress.monitor.metrics import DASHBOARD, labels

LOSS = "Train/Samples/train_loss"


def workspace(entity: str, project: str, boundaries: int) -> workspaces.Workspace:
    """Build the workspace, without saving it."""
    sections = [
        workspaces.Section(name="Loss", is_open=True, panels=[panels.LinePlot(title="train loss", y=[LOSS])])
    ]
    for title, names in DASHBOARD.items():
        charts = [panels.LinePlot(title=name, y=labels(boundaries, name)) for name in names]
        sections.append(workspaces.Section(name=title, is_open=True, panels=charts))
    return workspaces.Workspace(entity=entity, project=project, name="ds_compress", sections=sections)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("entity")
    parser.add_argument("project")
    parser.add_argument("--stages", type=int, required=True, help="of the pipeline")
    args = parser.parse_args()
    view = workspace(args.entity, args.project, args.stages - 1)
    view.save()
    print(view.url)


if __name__ == "__main__":
    main()
