//! Implements `mpgpu pages`, which writes the manual pages and shell completions of this command. It is meant for builders of packages, so
//! `--help` does not list it.

use crate::arguments::Failure;
use clap::Args;
use clap_complete::Shell;
use std::fs;
use std::path::PathBuf;

#[derive(Args)]
pub struct PagesArguments {
    /// Folder to fill, laid out like `share` of an installation
    folder: PathBuf,
}

pub fn run(mut command: clap::Command, arguments: &PagesArguments) -> Result<String, Failure> {
    let man = arguments.folder.join("man/man1");
    fs::create_dir_all(&man)?;
    clap_mangen::generate_to(command.clone(), man)?;
    for (shell, place) in [
        (Shell::Bash, "bash-completion/completions/mpgpu"),
        (Shell::Zsh, "zsh/site-functions/_mpgpu"),
        (Shell::Fish, "fish/vendor_completions.d/mpgpu.fish"),
    ] {
        let path = arguments.folder.join(place);
        fs::create_dir_all(path.parent().unwrap_or(&arguments.folder))?;
        clap_complete::generate(shell, &mut command, "mpgpu", &mut fs::File::create(path)?);
    }
    Ok(String::new())
}
