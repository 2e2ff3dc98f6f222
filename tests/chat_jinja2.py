# Writes chat_jinja2.json: what Jinja2, configured as transformers' apply_chat_template does, makes
# of small templates. Run in this folder with jinja2 3.1.6.
import json, datetime, re
from jinja2.sandbox import ImmutableSandboxedEnvironment
import jinja2, jinja2.ext
def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
def rexc(m): raise jinja2.exceptions.TemplateError(m)
env=ImmutableSandboxedEnvironment(trim_blocks=True,lstrip_blocks=True,extensions=[jinja2.ext.loopcontrols])
env.filters['tojson']=tojson; env.globals['raise_exception']=rexc
env.globals['strftime_now']=lambda f: datetime.datetime(2025,1,15,9,5,7).strftime(f)
V=json.loads('''{"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"  Hi 'there'\\n"},{"role":"assistant","content":null,"tool_calls":[{"id":"x1","function":{"name":"f","arguments":{"a":1,"b":[1.5,true,null,"ü\\"q"],"c":{}}}}]},{"role":"user","content":[{"type":"text","text":"A"},{"type":"image"}]}],"tools":null,"documents":null,"add_generation_prompt":true,"bos_token":"<s>","eos_token":"</s>","d":{"b":2,"a":1,"nested":{"k":[1,2,{"z":null}],"e":[],"o":{}}},"l":[3,1,2],"s":"Hello, World","f":1e22,"g":0.1,"neg":-7,"big":12345678901234567890,"t":true}''')
T=r'''
{{ messages[1:] | length }} {{ messages[-1].role }} {{ messages[::-1][0].role }} {{ l[1:][0] }}
{% for m in messages[1:] %}{{ loop.index0 }}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }} {{ loop.previtem.role if loop.previtem is defined }}-{{ loop.nextitem.role if loop.nextitem is defined }};{% endfor %}
{{ d }} {{ l }} {{ none }} {{ true }} {{ f }} {{ g }} {{ 1.0 }} {{ 1e-5 }} {{ 100000000000000000.0 }} {{ big }} {{ neg }}
{{ [1, 'a', "it's", 'q"q', 'b\'"', 'x\ny', 'tab\t', 'ü', true, none, 1.5, {'k': 'v'}] }}
{{ d|tojson }} {{ d|tojson(indent=4) }} {{ d|tojson(indent=2, sort_keys=true) }} {{ d | tojson(separators=(',', ':')) }} {{ 'üé😀'|tojson(ensure_ascii=true) }}
{{ messages[2].tool_calls[0].function.arguments|tojson }} {{ messages[2].tool_calls[0].function.arguments }}
{{ f|tojson }} {{ g|tojson }} {{ big|tojson }} {{ '\u2028<>&\'"'|tojson }} {{ [1,[2,[]]]|tojson(indent=1) }} {{ []|tojson(indent=2) }}
{{ s.split(', ')[-1] }} {{ s.split() }} {{ 'a,b,c'.split(',', 1) }} {{ 'a b  c '.split(' ') }} {{ '  a  b '.rsplit(None, 1) }} {{ 'a,b,c'.rsplit(',', 1)[0] }}
{{ '  x '.strip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'xa '.lstrip('x') }}|{{ ' a\n'.rstrip() }}|{{ '\n\n'.join(['a','b']) }}
{{ s.upper() }} {{ s.lower() }} {{ s.title() }} {{ s.capitalize() }} {{ s.find('o') }} {{ 'äöü'.find('ü') }} {{ s.count('l') }} {{ s.replace('l', 'L', 1) }} {{ s.startswith('He') }} {{ s.endswith(('x','World')) }} {{ 'a\nb\r\nc'.splitlines() }} {{ 'x'.isdigit() }} {{ '42'.isdigit() }} {{ ''.isspace() }} {{ 'k=v'.partition('=')[2] }} {{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('c') }} {{ 'ab'.zfill(5) }} {{ 'ab'.center(5,'*') }} {{ 'a'.ljust(3) }}|
{{ 'a' ~ 1 ~ none ~ true ~ 1.5 }} {{ 'ab' * 3 }} {{ [1] + [2] }} {{ 7 // 2 }} {{ 7 / 2 }} {{ 4 / 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 2 ** 3 }} {{ 7 % 3 }} {{ 1 + 1.0 }} {{ 10 - 3 }}
{{ 'a' in s }} {{ 'role' in messages[0] }} {{ 'x' not in messages[0] }} {{ 3 in l }} {{ 'Hello' in s and not false }}
{{ d.get('b') }} {{ d.get('zz') }} {{ d.get('zz', 'dflt') }} {% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %} {{ d.keys()|list }} {{ d.values()|list }} {{ d['a'] }} {{ d.nested.k[2].z }}
{% for k, v in d|items %}{{ k }}:{{ v }},{% endfor %}{% for k in d %}{{ k }}{% endfor %}
{{ messages|map(attribute='role')|join(', ') }} {{ messages|selectattr('role','equalto','user')|list|length }} {{ messages|rejectattr('role','equalto','user')|map(attribute='role')|list }} {{ l|sort }} {{ l|sum }} {{ l|max }} {{ l|min }} {{ l|first }} {{ l|last }} {{ l|reverse|list }} {{ l|join('-') }} {{ ['a','b']|map('upper')|join }} {{ [1,1,2]|unique|list }}
{{ s|length }} {{ s|upper }} {{ s|lower }} {{ 'ab cd'|title }} {{ 'ab CD'|capitalize }} {{ s|replace('o','0') }} {{ '  x '|trim }} {{ x|default('dd') }} {{ ''|default('e', true) }} {{ none|default('n') }} {{ none|default('n', boolean=true) }} {{ '5'|int + 1 }} {{ 'x'|int }} {{ '1.5'|float }} {{ 3.7|int }} {{ 2.5|round }} {{ 3.14159|round(2) }} {{ -3|abs }} {{ 'a\nb'|indent(2) }} {{ 'a\nb'|indent(2, true) }} {{ 5|string + 'x' }} {{ 'abc'|list }} {{ 'abc'|reverse }} {{ 'abc'|first }} {{ '%s=%d'|format('a', 3) }}
{{ 'a' is string }} {{ 1 is string }} {{ d is mapping }} {{ l is iterable }} {{ 'a' is iterable }} {{ l is sequence }} {{ 'a' is sequence }} {{ d is sequence }} {{ none is none }} {{ x is defined }} {{ x is undefined }} {{ 1 is number }} {{ 1.0 is number }} {{ true is number }} {{ true is boolean }} {{ 1 is integer }} {{ true is integer }} {{ 1.5 is float }} {{ 2 is even }} {{ 3 is odd }} {{ 4 is divisibleby 2 }} {{ none is iterable }} {{ x is iterable }} {{ 1 is in l }} {{ true is true }} {{ l[1:] is sequence }} {{ 'a' is eq 'a' }} {{ none is mapping }} {{ raise_exception is callable }}
{% set ns = namespace(a=1, found=false) %}{% for i in l %}{% set ns.a = ns.a + i %}{% if i == 1 %}{% set ns.found = true %}{% break %}{% endif %}{% endfor %}{{ ns.a }} {{ ns.found }}
{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% else %}none{% endfor %}{% for i in [] %}x{% else %}empty{% endfor %}{% for i in l if i > 1 %}{{ i }}{% endfor %}
{% macro m(a, b='z', c=none) %}<{{ a }}{{ b }}{{ c }}>{% endmacro %}{{ m(1) }}{{ m(1, c=2) }}{{ m('q', 'r') | upper }}{% set blk %}in {{ s }}{% endset %}[{{ blk }}]{{ blk|length }}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% if a == 1 and b != 3 or false %}yes{% elif b %}no{% else %}never{% endif %}{{ 'x' if a > 5 else 'y' }}{{ 'q' if false }}
{%- if true -%}   trimmed   {%- endif -%}  {{- ' left ' -}}   end
    {% if true %}
    indented
    {% endif %}
  {# comment #}
  after {% if true %} inline {% endif %} x
{{ undefined_thing }}{{ d.missing }}{{ d['missing'] }}{{ messages[0].foo is defined }}{% if undefined_thing %}a{% else %}b{% endif %}{% for x in undefined_thing %}c{% endfor %}
{{ strftime_now('%Y-%m-%d') }} {{ strftime_now("%d %B %Y, %H:%M:%S %A %j %p %I %-d") }}
{% raw %}{{ raw }}{% endraw %}{{ '{{' }}{{ "a\"b" }}{{ 'a\\b' }}{{ "\x41" }}{{ 'é' }}
{{ {} }} {{ [] }} {{ {1: 'x', none: 3} }} {{ '' }} {{ d.nested }}
{{ messages[1].content.strip() ~ '!' }} {{ messages[1]['content'] | trim }} {{ messages[2].content is none }} {{ messages[3].content[0].text }} {{ messages[3].content is string }} {{ (messages|last).role }} {{ messages[0]['role'] == 'system' }}
{{ 'a' < 'b' }} {{ 1 == 1.0 }} {{ 1 == true }} {{ [1,2] == [1,2] }} {{ {'a':1} == {'a':1} }} {{ not none }} {{ 1 < 2 < 3 }} {{ none == false }} {{ '1' == 1 }}
{{ '{} {}'.format('x', 1) }}
{{ 'abc'[0] }} {{ 'abc'[-1] }} {{ 'abcdef'[1:4] }} {{ 'abcdef'[:-1] }} {{ 'abcdef'[::2] }} {{ 'abc'[::-1] }} {{ l[:1] }} {{ l[-2:] }} {{ l[::-1] }} {{ 'äöü'[1] }}
{% for m in messages %}{% set c = m.content %}{% if loop.index0 % 2 == 0 %}{{ loop.cycle('odd', 'even') }}{% endif %}{% endfor %}{% filter upper %}abc{% endfilter %}{% with z = 3 %}{{ z }}{% endwith %}
{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{% endfor %}{{ x }}{% if true %}{% set x = 3 %}{% endif %}{{ x }}
{{ dict(a=1, b='x') }} {{ dict(a=1)|tojson }} {{ range(3)|list }} {{ range(1, 6, 2)|list }} {{ [1,2,3]|batch(2)|list }} {{ messages|groupby('role')|map(attribute='grouper')|list }} {{ l|select('gt', 1)|list }} {{ l|reject('odd')|list }} {{ ['a','']|select|list }}
{{- "x" }}
{{ l | map('string') | join('+') }} {{ [1.0, 2.5]|join(',') }} {{ [none, true]|join(',') }} {{ 'x' ~ l ~ messages[2].tool_calls }} {{ d ~ '' }} {{ d.nested|string + 'q' }}
{% call(x) m2() %}{% endcall %}
{% macro outer() %}({{ caller() }}){% endmacro %}{% call outer() %}inner{% endcall %}
{{ 1000000 }} {{ 1_000 }} {{ 0.1 + 0.2 }} {{ 1e3 }} {{ 3.0 * 2 }} {{ 2 ** 0.5 }} {{ 10 ** 2 }} {{ -2 ** 2 }} {{ 5 // 2.0 }}
{{ messages | length > 2 and messages[0].role == 'system' }} {{ (messages | length) - 1 }} {{ not tools }} {{ tools is not none and tools | length > 0 }} {{ tools or 'none' }} {{ none or 0 or 'z' }} {{ 1 and 'b' }}
{{ 'a\nb\n\nc\n'|indent(2, true, true) }} {{ 'a\n\nb'|indent('> ', blank=true) }} {{ ''|indent(2, true) }} {{ 'a\r\nb'|indent }} {{ '%5d|%-4s|%05.2f'|format(7, 'x', 1.5) }} {{ '{:>5}|{:<4}|{:05.2f}'.format(7, 'x', 1.5) }} {{ [1,2,3]|batch(2, 0)|list }} {{ [1,2,3]|slice(2)|list }} {{ 'a'.ljust(3, 'xy') }}
{{ s is startingwith 'x' if false else 'ok' }} {{ 'HI' is upper }} {{ 'hi' is lower }} {{ 1 is sameas 1 }} {{ 'b' is in ['a','b'] }} {{ 'zz' is filter }} {{ 'upper' is filter }}
'''
cases=[]
blocks=T.strip('\n').split('\n')
# multi-line pieces are joined by hand
multi=["    {% if true %}\n    indented\n    {% endif %}\n  {# comment #}\n  after {% if true %} inline {% endif %} x\n\n",
"{{ 'A'\n }}{{ \"multi\nline\" }} z\n", "a\n{%- if true %}\n  b\n{%- else %}\nc\n{%- endif %}\n\nd\n", "{% for i in l %}\n{{ i }}\n{% endfor %}\nend\n",
"{%+ if true %} x{% endif +%}\ny","a\r\nb\r\n{% if true %}\r\nc{% endif %}\r\n", "  {{ 1 }}\n  {%- set x = 2 %}\n  {{ x }}\n", "{# c #}\nx {# d #}  \n y{#- e -#}  z\n",
"{% set x %}\n multi\n{% endset %}\n[{{ x }}]", "x\n\n\n", "{% macro a() %}\n  l\n{% endmacro %}\n{{ a() }}|{{- a() -}}|", "\t{% if true %}\tt{% endif %}\n", "{{ 'x' -}}\n\n  y", "a {%- raw -%} {{x}} {%- endraw %} b", "{% if true %}\n\n  two\n{% endif %}", "{{ a\n}}\n{%- for m in messages -%}\n  {{- m.role -}}\n{%- endfor %}\n"]
for src in blocks+multi:
    # split one-line groups of expressions for better isolation
    parts=[src]
    if src.startswith('{{') and '{%' not in src and '\n' not in src:
        parts=[p for p in re.findall(r'\{\{.*?\}\}(?=\s|$|\||\{\{)',src)]
    for p in parts:
        try:
            out=env.from_string(p).render(**V); cases.append({"template":p,"expected":out})
        except Exception as e:
            cases.append({"template":p,"error":type(e).__name__,"message":str(e)})
json.dump({"variables":V,"cases":cases},open('chat_jinja2.json','w'),ensure_ascii=False,indent=1)
print(len(cases), 'cases,', sum('error' in c for c in cases), 'errors')
