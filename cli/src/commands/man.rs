//! `ruvllm man`: manual pages.

use crate::io::{Failure, note, print};
use clap_mangen::Man;
use std::fs;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  ruvllm man | man -l -                     reads the page of the program
  ruvllm man ~/.local/share/man/man1        writes a page for each subcommand: man ruvllm-serve";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Folder for the pages of the program and its subcommands [default: the program's goes to stdout]
    #[arg(value_name = "DIR")]
    folder: Option<PathBuf>,
}

pub(crate) fn run(args: &Args, mut program: clap::Command) -> Result<(), Failure> {
    // Subcommands get the names and flags that they are shown with.
    program.build();
    let Some(folder) = &args.folder else {
        let mut page = Vec::new();
        Man::new(program)
            .render(&mut page)
            .map_err(|error| Failure::Work(error.to_string()))?;
        return print(page);
    };
    fs::create_dir_all(folder).map_err(Failure::file(folder))?;
    let mut n_pages = 0;
    let mut rest = vec![(program.get_name().to_owned(), program)];
    while let Some((name, command)) = rest.pop() {
        for subcommand in command.get_subcommands() {
            if !subcommand.is_hide_set() && subcommand.get_name() != "help" {
                let name = format!("{name}-{}", subcommand.get_name());
                rest.push((name, subcommand.clone()));
            }
        }
        let path = folder.join(format!("{name}.1"));
        let mut page = Vec::new();
        let written = Man::new(command)
            .title(name)
            .render(&mut page)
            .and_then(|()| fs::write(&path, &page));
        written.map_err(Failure::file(&path))?;
        n_pages += 1;
    }
    note(format!("{}: {n_pages} pages", folder.display()));
    Ok(())
}
