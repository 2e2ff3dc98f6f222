//! What a Lark grammar says.

use std::collections::HashMap;

/// What a rule or terminal says.
#[derive(Debug)]
pub(super) enum Node {
    /// A pattern that may stand beside others.
    Pattern(String),
    Name(String),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    /// At least and at most so many.
    Repeat(Box<Node>, u32, Option<u32>),
}

/// A rule or a terminal.
pub(super) struct Rule {
    pub(super) body: Node,
    /// Whether texts that are ignored may come within it.
    pub(super) is_terminal: bool,
}

/// A grammar that was read.
#[derive(Default)]
pub(super) struct Grammar {
    pub(super) rules: Vec<Rule>,
    pub(super) names: HashMap<String, usize>,
    /// What may come between terminals.
    pub(super) ignored: Vec<Node>,
}

impl Node {
    /// The names in it.
    fn names<'a>(&'a self, all: &mut Vec<&'a str>) {
        match self {
            Node::Pattern(_) => {}
            Node::Name(name) => all.push(name),
            Node::Sequence(nodes) | Node::Choice(nodes) => {
                nodes.iter().for_each(|node| node.names(all))
            }
            Node::Repeat(node, ..) => node.names(all),
        }
    }
}

impl Grammar {
    /// Which rules contain themselves.
    pub(super) fn recursive(&self) -> Vec<bool> {
        let uses: Vec<Vec<usize>> = self
            .rules
            .iter()
            .map(|rule| {
                let mut names = Vec::new();
                rule.body.names(&mut names);
                names
                    .iter()
                    .filter_map(|name| self.names.get(*name).copied())
                    .collect()
            })
            .collect();
        let reaches_itself = |start: usize| {
            let (mut seen, mut left) = (vec![false; uses.len()], uses[start].clone());
            while let Some(rule) = left.pop() {
                if rule == start {
                    return true;
                }
                if !std::mem::replace(&mut seen[rule], true) {
                    left.extend(&uses[rule]);
                }
            }
            false
        };
        (0..uses.len()).map(reaches_itself).collect()
    }
}
