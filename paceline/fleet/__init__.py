"""Who does what when: the settings of a whole command are assembled here, above every folder that owns a part."""
