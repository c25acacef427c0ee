//! Tests the structure of the crates. Imports between the folders of a crate must have no cycles (cargo checks this for imports between
//! crates), and each type name must be unique. Also generates the diagram in `CONTRIBUTING.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItemFn, Item, ItemFn, ItemImpl, ItemMod, ItemUse, UseTree, Visibility};

/// Crates as folders of `rust/`. Each crate depends only on crates before it.
const CRATES: [&str; 11] = ["core", "measure", "backend", "ipc", "devices", "contexts", "ranks", "api", "ffi", "bench", "cli"];

/// Imports between folders of one crate, as pairs of importing and imported folder.
type Imports = BTreeSet<(Module, Module)>;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// True if code is compiled only for tests, that is, if it has the attribute `cfg(test)`, alone or combined with others.
fn is_test(attributes: &[Attribute]) -> bool {
    let names_test = |attribute: &Attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        list.path.is_ident("cfg") && list.tokens.to_string().split(|c: char| !c.is_alphanumeric()).any(|word| word == "test")
    };
    attributes.iter().any(names_test)
}

/// Visitor that collects the paths that a file uses, as absolute paths in its crate.
struct Names {
    /// Path of the module that is being read.
    here: Vec<String>,
    found: Vec<Vec<String>>,
}

impl Names {
    /// Adds a path that starts at the root of the crate, or at this module or a parent (`self`, `super`).
    fn add(&mut self, path: &[String]) {
        let mut base = match path.first().map(String::as_str) {
            Some("crate") => Vec::new(),
            Some("self" | "super") => self.here.clone(),
            _ => return,
        };
        for part in path {
            match part.as_str() {
                "crate" | "self" => {}
                "super" => drop(base.pop()),
                name => base.push(name.to_owned()),
            }
        }
        self.found.push(base);
    }

    fn add_tree(&mut self, before: &mut Vec<String>, tree: &UseTree) {
        match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.add_tree(before, &path.tree);
                before.pop();
            }
            UseTree::Name(name) => self.add(&[before.as_slice(), &[name.ident.to_string()]].concat()),
            UseTree::Rename(name) => self.add(&[before.as_slice(), &[name.ident.to_string()]].concat()),
            UseTree::Glob(_) => self.add(before),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.add_tree(before, tree)),
        }
    }
}

impl<'a> Visit<'a> for Names {
    fn visit_item(&mut self, item: &'a Item) {
        let attributes: &[Attribute] = match item {
            Item::Fn(ItemFn { attrs, .. }) | Item::Impl(ItemImpl { attrs, .. }) | Item::Mod(ItemMod { attrs, .. }) => attrs,
            Item::Use(ItemUse { attrs, .. }) => attrs,
            _ => &[],
        };
        if !is_test(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'a ImplItemFn) {
        if !is_test(&function.attrs) {
            visit::visit_impl_item_fn(self, function);
        }
    }

    fn visit_item_mod(&mut self, module: &'a ItemMod) {
        self.here.push(module.ident.to_string());
        visit::visit_item_mod(self, module);
        self.here.pop();
    }

    fn visit_item_use(&mut self, item: &'a ItemUse) {
        let before = self.found.len();
        self.add_tree(&mut Vec::new(), &item.tree);
        if !matches!(item.vis, Visibility::Inherited) {
            // If a folder re-exports names of folders inside of it, this is no import.
            let here = self.here.clone();
            let outside = self.found.split_off(before).into_iter().filter(|path| !path.starts_with(&here));
            self.found.extend(outside);
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        self.add(&path.segments.iter().map(|segment| segment.ident.to_string()).collect::<Vec<_>>());
        visit::visit_path(self, path);
    }
}

/// Path of a module in its crate, such as `["plan", "split"]`. The root of the crate is `[]`.
type Module = Vec<String>;

/// Parses the file of a module and of all its submodules, except tests.
fn read(file: &Path, module: Module, into: &mut Vec<(Module, syn::File)>) {
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let is_front = ["lib.rs", "main.rs", "mod.rs"].iter().any(|name| file.ends_with(name));
    let beside = if is_front { file.parent().expect("a file lies in a folder").to_owned() } else { file.with_extension("") };
    for item in &parsed.items {
        let Item::Mod(ItemMod { attrs, ident, content: None, .. }) = item else { continue };
        if !is_test(attrs) {
            let front = beside.join(ident.to_string()).join("mod.rs");
            let file = if front.exists() { front } else { beside.join(format!("{ident}.rs")) };
            read(&file, [module.as_slice(), &[ident.to_string()]].concat(), into);
        }
    }
    into.push((module, parsed));
}

/// Parses all modules of a crate.
fn parsed(name: &str) -> Vec<(Module, syn::File)> {
    let folder = root().join("rust").join(name);
    let file = ["lib.rs", "main.rs"].map(|file| folder.join(file)).into_iter().find(|file| file.exists()).expect("a crate has a root");
    let mut modules = Vec::new();
    read(&file, Module::new(), &mut modules);
    modules
}

/// Returns the folders of a crate, and the imports between them. A file next to folders at the root counts as a folder. A crate without
/// folders has none.
fn imports(name: &str) -> (BTreeSet<Module>, Imports) {
    let files = parsed(name);
    if files.iter().all(|(module, _)| module.len() < 2) {
        return Default::default();
    }
    let is_folder =
        |module: &Module| module.len() < 2 || files.iter().any(|(other, _)| other.len() > module.len() && other.starts_with(module));
    let folder = |module: &Module| if is_folder(module) { module.clone() } else { module[..module.len() - 1].to_vec() };
    let modules: BTreeMap<Module, Module> = files.iter().map(|(module, _)| (module.clone(), folder(module))).collect();
    let mut imports = Imports::new();
    for (module, file) in &files {
        let mut names = Names { here: module.clone(), found: Vec::new() };
        names.visit_file(file);
        for mut path in names.found {
            while !modules.contains_key(&path) {
                path.pop();
            }
            let (from, to) = (&modules[module], &modules[&path]);
            // The root module imports all others, which does not count.
            if from != to && !from.is_empty() && !to.is_empty() {
                imports.insert((from.clone(), to.clone()));
            }
        }
    }
    (modules.into_values().filter(|folder| !folder.is_empty()).collect(), imports)
}

/// Returns the folders sorted such that each imports only earlier ones. If there is a cycle, returns the folders that cannot be sorted.
fn order(folders: &BTreeSet<Vec<String>>, imports: &Imports) -> Result<Vec<Vec<String>>, Vec<Vec<String>>> {
    let mut sorted: Vec<Vec<String>> = Vec::new();
    loop {
        let ready = |folder: &&Vec<String>| {
            !sorted.contains(folder) && imports.iter().filter(|(from, _)| from == *folder).all(|(_, to)| sorted.contains(to))
        };
        let Some(next) = folders.iter().find(ready).cloned() else { break };
        sorted.push(next);
    }
    if sorted.len() == folders.len() {
        Ok(sorted)
    } else {
        Err(folders.iter().filter(|folder| !sorted.contains(folder)).cloned().collect())
    }
}

fn text(folder: &[String]) -> String {
    folder.join("/")
}

/// Returns the diagram: each crate with its sorted folders and their imports.
fn picture() -> String {
    let mut picture = String::from("```text\n");
    for name in CRATES {
        let manifest = std::fs::read_to_string(if name == "ffi" {
            root().join("Cargo.toml")
        } else {
            root().join("rust").join(name).join("Cargo.toml")
        })
        .expect("each crate has a manifest");
        let manifest: toml::Table = manifest.parse().expect("a manifest is TOML");
        let dependencies = manifest["dependencies"].as_table().expect("dependencies are a table");
        let below: Vec<&str> =
            dependencies.keys().filter_map(|key| if key == "mpgpu" { Some("ffi") } else { key.strip_prefix("mpgpu-") }).collect();
        let arrow = if below.is_empty() { String::new() } else { format!(" -> {}", below.join(", ")) };
        picture += &format!("{name}{arrow}\n");
        let (folders, imports) = imports(name);
        let in_order = order(&folders, &imports).unwrap_or_else(|circle| {
            let among = imports.iter().filter(|(from, to)| circle.contains(from) && circle.contains(to));
            let lines: String = among.map(|(from, to)| format!("    {} -> {}\n", text(from), text(to))).collect();
            panic!("rust/{name}: a circle among these imports:\n{lines}");
        });
        for folder in in_order {
            let of: Vec<String> = imports.iter().filter(|(from, _)| *from == folder).map(|(_, to)| text(to)).collect();
            let arrow = if of.is_empty() { String::new() } else { format!(" -> {}", of.join(", ")) };
            picture += &format!("    {}{arrow}\n", text(&folder));
        }
    }
    picture + "```\n"
}

#[test]
fn no_folders_import_each_other_and_contributing_shows_the_picture() {
    const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/CONTRIBUTING.md");
    let picture = picture();
    let page = std::fs::read_to_string(PAGE).expect("the page is there");
    let (begin, end) = ("<!-- imports: UPDATE_DOCS=1 cargo test --test library structure -->\n", "<!-- end of imports -->\n");
    let (before, rest) = page.split_once(begin).expect("the page has a place for the picture");
    let (shown, after) = rest.split_once(end).expect("the picture ends");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(PAGE, [before, begin, &picture, end, after].concat()).expect("the page can be written");
        return;
    }
    assert!(shown == picture, "the picture in CONTRIBUTING.md is not current; it would be\n{picture}");
}

#[test]
fn a_circle_is_found() {
    let folder = |name: &str| vec![name.to_owned()];
    let folders = BTreeSet::from(["a", "b", "c"].map(folder));
    let straight = Imports::from([(folder("a"), folder("b")), (folder("b"), folder("c"))]);
    assert_eq!(order(&folders, &straight), Ok(vec![folder("c"), folder("b"), folder("a")]));
    let circle = &straight | &Imports::from([(folder("c"), folder("b"))]);
    assert_eq!(order(&folders, &circle), Err(vec![folder("a"), folder("b"), folder("c")]));
    let mut names = Names { here: folder("a"), found: Vec::new() };
    let source = "use crate::b::{self, c::D}; use super::e; #[cfg(test)] mod tests { use crate::f; } fn g() { crate::h::i() }";
    names.visit_file(&syn::parse_file(source).expect("it is Rust"));
    assert_eq!(names.found.iter().map(|path| text(path)).collect::<Vec<_>>(), ["b", "b/c/D", "e", "h/i"]);
}

/// Visitor that collects the types that a file defines outside of functions.
struct Types(Vec<String>);

impl<'a> Visit<'a> for Types {
    fn visit_item(&mut self, item: &'a Item) {
        match item {
            Item::Struct(item) => self.0.push(item.ident.to_string()),
            Item::Enum(item) => self.0.push(item.ident.to_string()),
            Item::Trait(item) => self.0.push(item.ident.to_string()),
            Item::Type(item) => self.0.push(item.ident.to_string()),
            Item::Union(item) => self.0.push(item.ident.to_string()),
            Item::Mod(item) if !is_test(&item.attrs) => visit::visit_item_mod(self, item),
            _ => {}
        }
    }
}

#[test]
fn no_two_types_of_a_crate_have_the_same_name() {
    let mut twins = Vec::new();
    for name in CRATES {
        let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (module, file) in parsed(name) {
            let mut types = Types(Vec::new());
            types.visit_file(&file);
            types.0.into_iter().for_each(|found| places.entry(found).or_default().push(text(&module)));
        }
        twins.extend(
            places
                .into_iter()
                .filter(|(_, places)| places.len() > 1)
                .map(|(found, places)| format!("{found} in {name}: {}", places.join(", "))),
        );
    }
    assert!(twins.is_empty(), "types of one name:\n{}", twins.join("\n"));
}

/// Visitor that counts the methods of each type in a file, except methods of traits.
#[derive(Default)]
struct Methods(BTreeMap<String, usize>);

impl<'a> Visit<'a> for Methods {
    fn visit_item_impl(&mut self, item: &'a ItemImpl) {
        if let (None, syn::Type::Path(of)) = (&item.trait_, &*item.self_ty) {
            let name = of.path.segments.last().map_or(String::new(), |segment| segment.ident.to_string());
            *self.0.entry(name).or_default() += item.items.iter().filter(|item| matches!(item, syn::ImplItem::Fn(_))).count();
        }
    }
}

#[test]
fn no_type_has_eighty_methods() {
    let mut most = 0;
    for name in CRATES {
        let mut methods = Methods::default();
        parsed(name).iter().for_each(|(_, file)| methods.visit_file(file));
        let many: Vec<_> = methods.0.iter().filter(|(_, count)| **count >= 80).collect();
        assert!(many.is_empty(), "rust/{name}: {many:?}");
        most = methods.0.into_values().fold(most, usize::max);
    }
    assert!(most > 30, "they are counted");
}

/// Visitor that collects the string literals of a file, including those in macros and attributes, but not documentation and tests.
#[derive(Default)]
struct Texts(Vec<String>);

impl Texts {
    fn add_arguments(&mut self, parsed: syn::Result<Punctuated<syn::Expr, syn::Token![,]>>) {
        parsed.into_iter().flatten().for_each(|argument| self.visit_expr(&argument));
    }
}

impl<'a> Visit<'a> for Texts {
    fn visit_item_mod(&mut self, module: &'a ItemMod) {
        if !is_test(&module.attrs) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_attribute(&mut self, attribute: &'a Attribute) {
        if let syn::Meta::List(list) = &attribute.meta {
            self.add_arguments(list.parse_args_with(Punctuated::parse_terminated));
        }
    }

    fn visit_macro(&mut self, called: &'a syn::Macro) {
        self.add_arguments(called.parse_body_with(Punctuated::parse_terminated));
    }

    fn visit_lit_str(&mut self, text: &'a syn::LitStr) {
        self.0.push(text.value());
    }
}

/// Messages must not contain C function names, because users of C++, Fortran, Python, Rust and the command read them too. In `rust/ffi`,
/// messages may name enumerators.
#[test]
fn messages_name_no_functions_and_devices_of_c() {
    let mut named = Vec::new();
    let mut count = 0;
    for name in CRATES.into_iter().filter(|name| *name != "bench") {
        for (module, file) in parsed(name) {
            let mut texts = Texts::default();
            texts.visit_file(&file);
            count += texts.0.len();
            let is_name = |word: &&str| word.starts_with("mp_") || (word.starts_with("MP_") && name != "ffi");
            let words = texts.0.iter().flat_map(|text| text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')).filter(is_name);
            named.extend(words.map(|word| format!("{word} in {name}: {}", text(&module))));
        }
    }
    assert!(named.is_empty(), "names of C in messages:\n{}", named.join("\n"));
    assert!(count > 1000, "{count}: messages are found");
}

/// `cmake --build --parallel` without a number starts a compiler for each source file with make.
#[test]
fn no_script_builds_with_an_unbounded_number_of_compilers() {
    let mut builds = 0;
    for folder in ["tests", "tests/gpu", "tests/python", "examples", "packaging", "docs"] {
        for entry in std::fs::read_dir(root().join(folder)).expect("a folder").flatten().filter(|entry| entry.path().is_file()) {
            let Ok(text) = std::fs::read_to_string(entry.path()) else { continue };
            for line in text.lines().filter(|line| line.contains("cmake --build")) {
                let mut numbers =
                    line.match_indices("--parallel").map(|(at, found)| line[at + found.len()..].trim_start_matches([' ', '=']));
                assert!(
                    numbers.all(|number| number.starts_with(['"', '$', '1', '2', '3', '4', '8'])),
                    "{}: {line}",
                    entry.path().display()
                );
                builds += 1;
            }
        }
    }
    assert!(builds >= 4, "{builds} builds are found");
}

/// Tests the file with licences of linked crates. Run `packaging/notices` to update it.
#[test]
fn licences_are_there_of_all_crates_that_are_linked_in_and_of_no_others() {
    let mut linked = BTreeSet::new();
    for target in ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"] {
        let tree = std::process::Command::new(env!("CARGO"))
            .args(["tree", "--locked", "--workspace", "--edges", "normal", "--prefix", "none", "--format", "{p}", "--target", target])
            .current_dir(root())
            .output()
            .expect("cargo runs");
        assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
        // The output has lines such as "serde_derive v1.0.229 (proc-macro) (*)", and an empty line between workspace members.
        for (name, version) in String::from_utf8(tree.stdout).expect("UTF-8").lines().filter_map(|line| line.split_once(" v")) {
            linked.insert(format!("{name} {}", version.split(' ').next().unwrap_or(version)));
        }
    }
    let file = std::fs::read_to_string(root().join("LICENSE-THIRD-PARTY")).expect("the file is there");
    // Names of crates are below the name of each licence, indented by two: name, and version, which starts with a digit.
    let is_crate =
        |words: &[&str]| words.len() == 2 && words[1].starts_with(|c: char| c.is_ascii_digit()) && words[1].matches('.').count() >= 2;
    let told: BTreeSet<String> = file
        .lines()
        .filter_map(|line| line.strip_prefix("  "))
        .filter(|line| !line.starts_with(' ') && is_crate(&line.split(' ').collect::<Vec<_>>()))
        .map(str::to_owned)
        .collect();
    let others = |set: &BTreeSet<String>| set.iter().filter(|name| !name.starts_with("mpgpu")).cloned().collect::<BTreeSet<_>>();
    let (linked, told) = (others(&linked), others(&told));
    assert!(linked.len() > 50);
    assert_eq!(linked.symmetric_difference(&told).collect::<Vec<_>>(), Vec::<&String>::new(), "run packaging/notices");
}
