//! Process groups: ranks laid out in a grid of named dimensions, innermost first, and the groups along them.
//!
//! In the grid `tensor=2, data=3` ranks 0 and 1 make a group along `tensor`, ranks 0, 2 and 4 one along `data`. With
//! consecutive ranks on a node the innermost dimensions stay inside it, which is how programs place what talks most.
#![forbid(unsafe_code)]

use super::file::{Dimension, WORLD};
use super::formula::{unknown, Names};
use std::collections::BTreeSet;
use strata::error::{Error, Result};

/// The grid of all ranks.
#[derive(Debug)]
pub struct Layout {
    /// Names and sizes, innermost first.
    pub dimensions: Vec<(String, usize)>,
}

/// The groups along some dimensions; there is one for each place in the others.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Group {
    /// The dimensions, joined by `*`.
    pub name: String,
    /// How many ranks each has.
    pub size: usize,
    /// Which dimensions, as indices of the layout, in its order.
    pub along: Vec<usize>,
}

impl Layout {
    /// Sizes of the dimensions in a world; the names get them, too.
    pub fn new(grid: &[Dimension], world: usize, names: &mut Names) -> Result<Layout> {
        let mut sizes = Vec::new();
        let mut product = 1usize;
        for dimension in grid {
            // A dimension that was set otherwise stands among the names already.
            let formula = names.formula(&dimension.name).or(dimension.size.clone());
            let size = formula.map(|formula| names.whole(&formula)).transpose()?.map(|size| size as usize);
            if let Some(size) = size {
                names.set(&dimension.name, size as f64);
                product = product.saturating_mul(size);
            }
            sizes.push(size);
        }
        let shown = |sizes: &[Option<usize>]| {
            let text = |(dimension, size): (&Dimension, &Option<usize>)| {
                format!("{}={}", dimension.name, size.map_or("rest".into(), |size| size.to_string()))
            };
            grid.iter().zip(sizes).map(text).collect::<Vec<_>>().join(" ")
        };
        let rest = sizes.iter().position(Option::is_none);
        if product == 0 || !world.is_multiple_of(product) || (rest.is_none() && product != world) {
            let needed = if rest.is_some() { "a multiple of" } else { "exactly" };
            return Err(Error::InvalidArgument(format!(
                "the grid {} needs {needed} {product} ranks, not {world}; --set changes a dimension",
                shown(&sizes)
            )));
        }
        if let Some(rest) = rest {
            sizes[rest] = Some(world / product);
            names.set(&grid[rest].name, (world / product) as f64);
        }
        let dimensions = grid.iter().zip(sizes).map(|(dimension, size)| (dimension.name.clone(), size.unwrap_or(1)));
        Ok(Layout { dimensions: dimensions.collect() })
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.dimensions.iter().map(|(_, size)| size).product()
    }

    /// The groups along the dimensions with these names.
    pub fn group(&self, names: &[String]) -> std::result::Result<Group, String> {
        let mut along = BTreeSet::new();
        for name in names {
            match self.dimensions.iter().position(|(known, _)| known == name) {
                Some(index) => along.extend([index]),
                None if name == WORLD => along.extend(0..self.dimensions.len()),
                None => {
                    let known: Vec<&str> =
                        self.dimensions.iter().map(|(name, _)| name.as_str()).chain([WORLD]).collect();
                    return Err(format!("the group {}", unknown(name, &known)));
                }
            }
        }
        let along: Vec<usize> = along.into_iter().collect();
        let named = |index: &usize| self.dimensions[*index].0.as_str();
        let name = match along.len() > 1 && along.len() == self.dimensions.len() {
            true => WORLD.to_string(),
            false => along.iter().map(named).collect::<Vec<_>>().join("*"),
        };
        let size = along.iter().map(|&index| self.dimensions[index].1).product();
        Ok(Group { name, size, along })
    }

    /// Which of the groups a rank is in, and its rank there.
    pub fn place(&self, group: &Group, rank: usize) -> (usize, usize) {
        let (mut colour, mut colours, mut key, mut keys, mut rest) = (0, 1, 0, 1, rank);
        for (index, (_, size)) in self.dimensions.iter().enumerate() {
            let digit = rest % size;
            rest /= size;
            if group.along.contains(&index) {
                key += digit * keys;
                keys *= size;
            } else {
                colour += digit * colours;
                colours *= size;
            }
        }
        (colour, key)
    }

    /// The members of all groups along the dimensions, each in the order of their ranks there.
    pub fn members(&self, group: &Group) -> Vec<Vec<usize>> {
        let world = self.world();
        let mut all = vec![vec![0; group.size]; world / group.size];
        for rank in 0..world {
            let (colour, key) = self.place(group, rank);
            all[colour][key] = rank;
        }
        all
    }

    /// The different ways in which these groups lie on nodes of `per_node` consecutive ranks: for each rank of a group
    /// its node, nodes numbered in the order of their first rank.
    pub fn shapes(&self, group: &Group, per_node: usize) -> Vec<Vec<usize>> {
        let mut shapes = BTreeSet::new();
        for members in self.members(group) {
            let mut seen = Vec::new();
            let number = |rank: usize| {
                let node = rank / per_node;
                seen.iter().position(|&known| known == node).unwrap_or_else(|| {
                    seen.push(node);
                    seen.len() - 1
                })
            };
            shapes.insert(members.into_iter().map(number).collect::<Vec<usize>>());
        }
        shapes.into_iter().collect()
    }

    /// The grid in a line.
    pub fn text(&self) -> String {
        self.dimensions.iter().map(|(name, size)| format!("{name}={size}")).collect::<Vec<_>>().join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::super::formula::Formula;
    use super::*;

    fn layout(sizes: &[(&str, &str)], world: usize) -> Result<Layout> {
        let dimension = |&(name, size): &(&str, &str)| Dimension {
            name: name.to_string(),
            size: Some(Formula { text: size.to_string(), line: 3 }).filter(|_| size != "rest"),
        };
        let grid: Vec<Dimension> = sizes.iter().map(dimension).collect();
        Layout::new(&grid, world, &mut Names::default())
    }

    fn group(layout: &Layout, names: &[&str]) -> Group {
        layout.group(&names.iter().map(|name| name.to_string()).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn groups_along_a_dimension_are_its_ranks_with_the_others_fixed() {
        let layout = layout(&[("x", "2"), ("y", "3"), ("d", "rest")], 12).unwrap();
        assert_eq!(layout.text(), "x=2 y=3 d=2");
        assert_eq!(layout.members(&group(&layout, &["x"]))[0], [0, 1]);
        assert_eq!(layout.members(&group(&layout, &["y"]))[1], [1, 3, 5]);
        assert_eq!(layout.members(&group(&layout, &["d"]))[5], [5, 11]);
        assert_eq!(layout.members(&group(&layout, &["d", "x"]))[2], [4, 5, 10, 11], "in the grid's order");
        assert_eq!(layout.members(&group(&layout, &["world"])), [(0..12).collect::<Vec<_>>()]);
        assert_eq!(group(&layout, &["x", "y", "d"]).name, "world");
    }

    #[test]
    fn a_world_that_the_grid_does_not_divide_is_refused_with_both_numbers() {
        let text = |sizes: &[(&str, &str)], world| layout(sizes, world).unwrap_err().text().to_string();
        assert_eq!(
            text(&[("x", "2"), ("y", "3"), ("d", "rest")], 8),
            "the grid x=2 y=3 d=rest needs a multiple of 6 ranks, not 8; --set changes a dimension"
        );
        assert_eq!(
            text(&[("x", "2"), ("y", "3")], 12),
            "the grid x=2 y=3 needs exactly 6 ranks, not 12; --set changes a dimension"
        );
        assert!(text(&[("x", "0"), ("y", "rest")], 12).contains("a multiple of 0"));
        assert!(text(&[("x", "z"), ("y", "rest")], 12).contains("line 3: `z` uses the unknown name `z`"));
    }

    #[test]
    fn unknown_groups_are_named_with_their_like() {
        let layout = layout(&[("tensor", "2"), ("data", "rest")], 12).unwrap();
        assert_eq!(
            layout.group(&["tenser".to_string()]).unwrap_err(),
            "the group uses the unknown name `tenser`; did you mean `tensor`?"
        );
    }

    #[test]
    fn groups_lie_on_nodes_as_the_grid_says() {
        let layout = layout(&[("x", "2"), ("z", "4"), ("d", "rest")], 16).unwrap();
        assert_eq!(layout.shapes(&group(&layout, &["x"]), 8), [[0, 0]]);
        assert_eq!(layout.shapes(&group(&layout, &["z"]), 4), [[0, 0, 1, 1]]);
        assert_eq!(layout.shapes(&group(&layout, &["d"]), 8), [[0, 1]]);
        assert_eq!(layout.shapes(&group(&layout, &["z"]), 6).len(), 2, "0 0 0 1 and 0 0 1 1");
    }
}
