"""Style sheet of the report: light, one family of type, prints well."""

STYLE = """
:root { --ink: #1c2733; --soft: #5d6b7a; --line: #e3e8ee; --paper: #fff; --ground: #f5f7f9; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); -webkit-font-smoothing: antialiased;
  font: 15px/1.5 "Inter", "Segoe UI", system-ui, -apple-system, Arial, "Liberation Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; margin: 0; letter-spacing: -0.02em; display: flex; align-items: center; gap: 14px; }
h2 { font-size: 18px; margin: 44px 0 14px; letter-spacing: -0.01em; }
header p { margin: 4px 0 0; color: var(--soft); }
.state { font-size: 13px; font-weight: 600; padding: 3px 11px; border-radius: 99px; background: #e8edf2;
  color: var(--soft); letter-spacing: 0; }
.state.finished { background: #dff3ec; color: #0f6b5f; }
.state.failed { background: #fbe3e6; color: #a02a3b; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); gap: 14px; margin-top: 26px; }
.tile, .card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 15px 16px; display: flex; flex-direction: column; min-width: 0; }
.tile b { font-size: 21px; font-weight: 650; letter-spacing: -0.02em; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; }
.tile span { font-weight: 500; }
.tile small { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(540px, 100%), 1fr)); gap: 16px; }
.card { margin: 0; padding: 16px 18px 14px; min-width: 0; break-inside: avoid; overflow-x: auto; }
.card.wide { grid-column: 1 / -1; }
figcaption { font-weight: 600; margin-bottom: 8px; }
.note { margin: 8px 0 0; color: var(--soft); font-size: 13px; }
.empty { color: var(--soft); font-style: italic; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit; font-size: 12px; fill: #5d6b7a; }
svg text.name { fill: #1c2733; font-size: 13px; }
svg text.value { fill: #1c2733; font-weight: 600; }
svg text.label { font-size: 12px; font-weight: 500; }
svg .grid { stroke: #e9edf2; stroke-width: 1; }
svg .axis { stroke: #b9c3ce; stroke-width: 1; }
svg .lane { fill: #f3f5f8; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-top: 8px; font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
.state.running { background: #e3edf9; color: #235a94; }
table { width: 100%; border-collapse: collapse; font-size: 14px; }
th { text-align: left; font-weight: 500; color: var(--soft); padding: 4px 10px 6px 0; }
td { border-top: 1px solid var(--line); padding: 6px 10px 6px 0; vertical-align: top; overflow-wrap: anywhere; }
code { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; white-space: pre-wrap; }
.right { color: #178f83; font-weight: 700; }
.wrong { color: #c53a4b; font-weight: 700; }
@media print { body { background: #fff; } main { padding: 0; } }
"""
