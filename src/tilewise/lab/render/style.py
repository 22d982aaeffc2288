"""The one style of all pages: light, dark and print from the same rules, by colours that have names.

Colours say whose a candidate is (`--ours`, `--torch`, `--other`) or what a kernel does (`--attention`, `--product`, and
so on), and never the one where they mean the other. tests/lab/test_html.py holds every pair of ink and ground to WCAG's
AA.
"""

from __future__ import annotations

LIGHT = {
    "ink": "#12161c", "paper": "#ffffff", "soft": "#f5f6f8", "line": "#d9dee4", "quiet": "#525c68", "mark": "#e9f1fd",
    "link": "#0b57b8", "track": "#eceff2", "hatch": "#b9c1ca", "bad": "#b3211a", "bad-soft": "#fdeeed",
    "warn": "#7a4d00", "warn-soft": "#fdf4e0", "good": "#0d6b3c",
    "ours": "#1a66d9", "torch": "#c4560f", "other": "#6a7480",
    "attention": "#7440b8", "product": "#9a7400", "softmax": "#bf3470", "reduction": "#0b7f76", "move": "#69737f",
    "anything": "#8a6f5c",
}  # fmt: skip
DARK = {
    "ink": "#e7eaee", "paper": "#111418", "soft": "#1a1e24", "line": "#333b45", "quiet": "#a3adb9", "mark": "#16263d",
    "link": "#84b8fa", "track": "#222830", "hatch": "#47515d", "bad": "#ff8d85", "bad-soft": "#36191a",
    "warn": "#efc26a", "warn-soft": "#322609", "good": "#6fd19c",
    "ours": "#5aa2ff", "torch": "#f09654", "other": "#929daa",
    "attention": "#b48cf0", "product": "#d4b13c", "softmax": "#ee83ae", "reduction": "#4cc4b8", "move": "#8e99a6",
    "anything": "#b89a84",
}  # fmt: skip
PRINT = LIGHT | {"ink": "#000000", "soft": "#ffffff", "quiet": "#333333", "link": "#000000", "line": "#aaaaaa"}


def _tokens(colours: dict[str, str]) -> str:
    return ";".join(f"--{name}:{value}" for name, value in colours.items())


_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0 auto;max-width:68rem;padding:2rem clamp(1rem,4vw,2.5rem) 4rem;background:var(--paper);color:var(--ink);
font:400 1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:break-word;
font-variant-numeric:tabular-nums}
code,.name,.mono{font-family:ui-monospace,"SF Mono",SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;
font-size:.92em}
a{color:var(--link);text-underline-offset:.15em}
:focus-visible{outline:2px solid var(--link);outline-offset:2px;border-radius:2px}
.skip{position:absolute;left:-99rem}.skip:focus{left:1rem;top:.5rem;background:var(--paper);padding:.5rem;z-index:9}
.eyebrow{margin:0;color:var(--quiet);font-size:.875rem}
h1{font-size:clamp(1.6rem,1.1rem + 2.4vw,2.5rem);line-height:1.15;letter-spacing:-.02em;font-weight:650;
margin:.35rem 0 .4rem}
h1 .ours{color:var(--ours)}h1 .bad{color:var(--bad)}
.hero{font-size:1.05rem;margin:0;display:flex;flex-wrap:wrap;gap:.1rem .55rem;max-width:none}
.hero>:not(:last-child)::after{content:"·";color:var(--quiet);margin-left:.55rem}
.hero .ok{color:var(--good)}.hero .bad{color:var(--bad)}
.lead{margin:.7rem 0 0;max-width:52rem;color:var(--quiet)}
.banner{margin:1rem 0 0;padding:.6rem .9rem;border-left:3px solid var(--warn);background:var(--warn-soft);
color:var(--warn);border-radius:0 .25rem .25rem 0}
.banner.bad{border-color:var(--bad);background:var(--bad-soft);color:var(--bad)}
.banner p{margin:.1rem 0}
nav{margin:1.4rem 0 0;border-top:1px solid var(--line);border-bottom:1px solid var(--line);padding:.45rem 0;
font-size:.875rem}
nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;padding:0;margin:0}
nav a{text-decoration:none}nav a:hover{text-decoration:underline}
h2{font-size:1.15rem;line-height:1.3;margin:2.6rem 0 .5rem;letter-spacing:-.01em}
h3 small{font-weight:400}h3{font-size:.95rem;margin:1.5rem 0 .3rem;overflow-wrap:anywhere}
p{margin:.5rem 0;max-width:52rem}
.note,figcaption{color:var(--quiet);font-size:.85rem;max-width:52rem}
.bad{color:var(--bad)}.ok{color:var(--good)}
ul.plain{list-style:none;padding:0;margin:0}
figure{margin:.6rem 0 1rem}figcaption{margin:0 0 .35rem}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.15rem 1.1rem;margin:.1rem 0 .5rem;padding:0;font-size:.8rem;
color:var(--quiet)}
.legend li{display:flex;align-items:center;gap:.4rem}
.key{display:inline-block;flex:none;width:.7rem;height:.7rem;border-radius:2px;background:var(--k)}
.tag{display:inline-flex;gap:.45rem;align-items:baseline}.tag code{min-width:0}
.key.line{width:0;height:.9rem;border-left:2px dashed var(--ink);background:none;border-radius:0}
.key.spread{width:1.1rem;height:.6rem;border:solid var(--ink);border-width:0 1px;border-radius:0;
background:linear-gradient(var(--ink),var(--ink)) center/100% 1px no-repeat}
.key.gap,.strip{background:repeating-linear-gradient(135deg,var(--track) 0 3px,var(--hatch) 3px 4px)}
.ours{--k:var(--ours)}.torch{--k:var(--torch)}.other{--k:var(--other)}
.attention{--k:var(--attention)}.product{--k:var(--product)}.softmax{--k:var(--softmax)}
.reduction{--k:var(--reduction)}.move{--k:var(--move)}.anything{--k:var(--anything)}.lost{--k:var(--bad)}
.bars{list-style:none;margin:0;padding:0;font-size:.875rem}
.bars>li{display:grid;grid-template-columns:minmax(7rem,15rem) minmax(6rem,1fr) 5.5rem 12.5rem;column-gap:.9rem;
align-items:center}
.bars.narrow>li{grid-template-columns:minmax(7rem,19rem) minmax(6rem,1fr) 12.5rem}
.bars .name{padding:.3rem 0;overflow-wrap:anywhere;line-height:1.25}
.bars .name small{display:block;font-family:system-ui,sans-serif;color:var(--quiet);font-size:.85em}
.bars .value{text-align:right;white-space:nowrap;font-weight:600}
.bars .value .aside{font-weight:400}.bars .aside{color:var(--quiet);font-size:.92em}
.bars .chosen .name{font-weight:700;color:var(--ours)}
.bars .wins .aside{color:var(--ink)}
.track{position:relative;align-self:stretch;min-height:1.7rem;display:block}
.track>*{position:absolute;display:block}
.track .bar{top:50%;height:.8rem;margin-top:-.4rem;min-width:2px;background:var(--k);border-radius:0 2px 2px 0}
.track .bar.left{border-radius:2px 0 0 2px}.track .bar.lost{height:.4rem;margin-top:-.2rem}
.track .room{top:50%;height:.8rem;margin-top:-.4rem;left:0;right:0;background:var(--track);border-radius:2px}
.track .spread{top:50%;height:.55rem;margin-top:-.275rem;min-width:2px;border:solid var(--ink);border-width:0 1px;
background:linear-gradient(var(--ink),var(--ink)) center/100% 1px no-repeat;
filter:drop-shadow(0 0 1px var(--paper)) drop-shadow(0 0 1px var(--paper))}
.track .at{top:0;bottom:0;width:0;border-left:2px dashed var(--ink);margin-left:-1px;opacity:.75}
.track .one{top:0;bottom:0;width:0;border-left:1px solid var(--ink)}
.track .grid{top:0;bottom:0;width:0;border-left:1px solid var(--line)}
.ticks .track{min-height:1.2rem}.ticks .tick{top:0;transform:translateX(-50%);color:var(--quiet);font-size:.75rem;
white-space:nowrap}.ticks .first{transform:none}.ticks .last{transform:translateX(-100%)}
.scroll{overflow-x:auto;margin:.6rem 0;border:1px solid var(--line);border-radius:.3rem}
table{border-collapse:separate;border-spacing:0;width:100%;font-size:.85rem}
th,td{padding:.38rem .7rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
tbody tr:last-child>*{border-bottom:0}
thead th{color:var(--quiet);font-weight:500;white-space:nowrap;background:var(--soft)}
tbody th{font-weight:500;background:var(--paper)}
th:first-child{position:sticky;left:0;z-index:1;min-width:11rem;max-width:22rem;overflow-wrap:anywhere}
.scroll td:not(.number){min-width:6.5rem}
tbody th:first-child{border-right:1px solid var(--line)}
thead th:first-child{border-right:1px solid var(--line)}
.number{text-align:right;white-space:nowrap}
.marked>*{background:var(--mark)}.marked>th{font-weight:700}
td ul,dd ul{margin:0;padding-left:1.1rem}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,13.5rem),1fr));gap:.7rem 1.4rem;margin:.6rem 0}
dl>div{min-width:0}dl>.wide{grid-column:1/-1}
dt{color:var(--quiet);font-size:.78rem}dd{margin:0;font-size:.9rem;overflow-wrap:anywhere}
details{margin:.45rem 0}
summary{cursor:pointer;padding:.25rem 0}
summary:hover{color:var(--link)}
details.fold>summary{font-size:.9rem}
details[open].fold>summary{margin-bottom:.3rem}
details.box{border-top:1px solid var(--line);margin:0;padding:.2rem 0}
details.box:last-of-type{border-bottom:1px solid var(--line)}
.lanes{margin:.5rem 0}
.lanes summary{display:grid;grid-template-columns:minmax(7rem,15rem) minmax(6rem,1fr) 11rem;gap:0 .9rem;
align-items:center;list-style:none;font-size:.875rem}
.lanes summary::-webkit-details-marker{display:none}
.lanes summary .name::before{content:"▸";display:inline-block;width:1.1em;color:var(--quiet)}
.lanes details[open] summary .name::before{content:"▾"}
.lanes th:first-child{min-width:17rem}.lanes .aside{color:var(--quiet);text-align:right}
.strip{display:block;width:100%;height:1.1rem;border-radius:2px}
.strip .part{fill:var(--k)}
.plot{position:relative;height:21rem;margin:.6rem 0 3rem 4.6rem;border-left:1px solid var(--line);
border-bottom:1px solid var(--line)}
.plot svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.plot .grid{stroke:var(--line);stroke-width:1}.plot .roof{stroke:var(--ink);stroke-width:2;fill:none}
.plot .flat{stroke:var(--quiet);stroke-width:1.5;stroke-dasharray:5 4;fill:none}
.plot .leader{stroke:var(--quiet);stroke-width:1}
.plot line,.plot polyline{vector-effect:non-scaling-stroke}
.plot .x,.plot .y,.plot .axis{position:absolute;font-size:.72rem;color:var(--quiet);white-space:nowrap;line-height:1}
.plot .x{top:calc(100% + .4rem);transform:translateX(-50%)}
.plot .x.first{transform:none}.plot .x.last{transform:translateX(-100%)}
.plot .y{right:100%;transform:translateY(-50%);padding-right:.4rem}
.plot .axis{top:calc(100% + 1.6rem);left:50%;transform:translateX(-50%)}
.plot .dot{position:absolute;width:.6rem;height:.6rem;margin:-.3rem 0 0 -.3rem;border-radius:50%;background:var(--k);
border:1px solid var(--paper)}
.plot .label{position:absolute;font-size:.72rem;line-height:1;white-space:nowrap;color:var(--ink);padding:1px 3px;
background:color-mix(in srgb,var(--paper) 85%,transparent);transform:translateY(-50%)}
.plot .label.left{transform:translate(-100%,-50%)}
footer{margin-top:3rem;padding-top:.6rem;border-top:1px solid var(--line);color:var(--quiet);font-size:.8rem}
@media (max-width:46rem){
.bars>li,.bars.narrow>li{grid-template-columns:minmax(9rem,1fr) auto minmax(0,auto);column-gap:.7rem;padding:.3rem 0}
.bars .name{grid-column:1;padding:0}.bars .value{grid-column:2}.bars .aside{grid-column:3;text-align:right}
.bars .track{grid-column:1/-1;grid-row:2;min-height:1.3rem}
.bars.narrow .value{grid-column:2/-1}
.bars .aside .more{display:none}
.lanes summary{grid-template-columns:1fr auto}.lanes .strip-cell{grid-column:1/-1;grid-row:2;padding:.2rem 0}
.ticks .track{grid-row:1}.ticks .name,.ticks .value,.ticks .aside{display:none}
th:first-child,.lanes th:first-child{min-width:8.8rem;max-width:42vw}
.plot{margin-left:4.2rem}
}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}*{transition:none!important;animation:none!important}}
@media (forced-colors:active){.bar,.key,.part,.dot{forced-color-adjust:none}}
"""

_PRINT = """
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
body{max-width:none;padding:0;font-size:9.5pt}nav,.skip{display:none}.scroll{overflow:visible;border:0}
h2,h3,figcaption{break-after:avoid}tr,figure,.bars>li,dl>div{break-inside:avoid}
th:first-child{position:static}
table{font-size:7pt}th,td{padding:1.5pt 3pt}th,.number{white-space:normal}
th:first-child,.lanes th:first-child,.scroll td:not(.number){min-width:0}
"""

STYLE = (
    f":root{{color-scheme:light dark;{_tokens(LIGHT)}}}\n"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_tokens(DARK)}}}}}\n"
    f"{_RULES}@media print{{:root{{color-scheme:light;{_tokens(PRINT)}}}{_PRINT}}}\n"
)
