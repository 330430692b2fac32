package dialect

import (
	"fmt"
	"time"
)

// List selects the partitions: schema, name, bounds, whether attached, whether its detachment is pending, comment.
// Detached tables are among them if they are retired.
func (Partitioned) List(parent Table) Query {
	return Query{Text: `SELECT n.nspname, c.relname, coalesce(pg_catalog.pg_get_expr(c.relpartbound, c.oid), ''), i.inhrelid IS NOT NULL, ` +
		`coalesce(i.inhdetachpending, false), coalesce(d.description, '') ` +
		`FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace ` +
		`LEFT JOIN pg_catalog.pg_inherits i ON i.inhrelid = c.oid ` +
		`LEFT JOIN pg_catalog.pg_description d ON d.objoid = c.oid AND d.classoid = 'pg_catalog.pg_class'::regclass AND d.objsubid = 0 ` +
		`WHERE i.inhparent = ` + RegClass(parent) + ` ` +
		`OR i.inhrelid IS NULL AND c.relkind = 'r' AND starts_with(d.description, ` + Literal(RetiredComment) + `)`}
}

// CheckServer asks for a server of at least a version, as server_version_num has it.
func (Partitioned) CheckServer(least int) Query {
	return Query{Text: fmt.Sprintf(`SELECT 'the server is PostgreSQL ' || pg_catalog.current_setting('server_version') || ', partitions need %d or later' `+
		`WHERE pg_catalog.current_setting('server_version_num')::int < %d`, least/10000, least)}
}

// RetiredComment begins the comment on a partition that is retired, see package partitions.
const RetiredComment = "watermill-inbox: retired partition "

// Comment is the statement that comments on a table.
func (Partitioned) Comment(table Table, comment string) Query {
	return Query{Text: `COMMENT ON TABLE ` + table.Quoted() + ` IS ` + Literal(comment)}
}

// Clock selects the database's time in milliseconds since 1970.
func (Partitioned) Clock() Query {
	return Query{Text: `SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint`}
}

// Exists selects whether the table is there.
func (Partitioned) Exists(table Table) Query {
	return Query{Text: `SELECT ` + RegClass(table) + ` IS NOT NULL`}
}

// LockTable takes a lock for the transaction, or fails after the patience.
func (Partitioned) LockTable(table Table, mode string, patience time.Duration) []Query {
	return []Query{
		{Text: fmt.Sprintf(`SET LOCAL lock_timeout = %d`, patience.Milliseconds())},
		{Text: `LOCK TABLE ONLY ` + table.Quoted() + ` IN ` + mode + ` MODE`},
	}
}

// CreatePartition makes a table that nobody knows yet, like the parent.
func (Partitioned) CreatePartition(parent, part Table) Query {
	return Query{Text: `CREATE TABLE ` + part.Quoted() + ` (LIKE ` + parent.Quoted() + ` INCLUDING ALL)`}
}

// Attach makes a table a partition.
func (Partitioned) Attach(parent, part Table, ids IDRange) Query {
	return Query{Text: `ALTER TABLE ` + parent.Quoted() + ` ATTACH PARTITION ` + part.Quoted() + ` ` + ids.Bounds()}
}

// Detach detaches a partition CONCURRENTLY, or does FINALIZE it.
func (Partitioned) Detach(parent, part Table, how string) Query {
	return Query{Text: `ALTER TABLE ` + parent.Quoted() + ` DETACH PARTITION ` + part.Quoted() + ` ` + how}
}

// Drop drops a detached partition.
func (Partitioned) Drop(part Table) Query { return Query{Text: `DROP TABLE ` + part.Quoted()} }

// GiveOwner selects the statement that gives a table the owner of another, if that is somebody else.
func (Partitioned) GiveOwner(from, to Table) Query {
	return Query{Text: `SELECT format(` + Literal(`ALTER TABLE `+to.Quoted()+` OWNER TO %I`) + `, pg_get_userbyid(relowner)) ` +
		`FROM pg_catalog.pg_class WHERE oid = ` + RegClass(from) + ` AND pg_get_userbyid(relowner) <> current_user`}
}

// GiveGrants selects the statements that grant on a table what is granted on another.
func (Partitioned) GiveGrants(from, to Table) Query {
	grantee := `CASE acl.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END || CASE WHEN acl.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END`
	on := ` ON TABLE ` + to.Quoted() + ` TO %s`
	return Query{Text: `SELECT format(` + Literal(`GRANT %s`+on) + `, acl.privilege_type, ` + grantee + `) ` +
		`FROM pg_catalog.pg_class c, aclexplode(c.relacl) AS acl WHERE c.oid = ` + RegClass(from) + ` UNION ALL ` +
		`SELECT format(` + Literal(`GRANT %s (%I)`+on) + `, acl.privilege_type, a.attname, ` + grantee + `) ` +
		`FROM pg_catalog.pg_attribute a, aclexplode(a.attacl) AS acl WHERE a.attrelid = ` + RegClass(from) + ` AND NOT a.attisdropped`}
}

// conversionCheck and the bound are the name of the CHECK that a conversion adds.
const conversionCheck = "watermill_inbox_below_"

// Conversion selects how far the conversion of a table has come: its kind (r: plain, p: partitioned), the bound of the
// CHECK, empty if there is none, and whether that is validated. No row: there is no table.
func (Partitioned) Conversion(table Table) Query {
	return Query{Text: `SELECT c.relkind::text, coalesce(substr(k.conname, ` + fmt.Sprint(len(conversionCheck)+1) + `), ''), coalesce(k.convalidated, false) ` +
		`FROM pg_catalog.pg_class c LEFT JOIN pg_catalog.pg_constraint k ` +
		`ON k.conrelid = c.oid AND k.contype = 'c' AND starts_with(k.conname, ` + Literal(conversionCheck) + `) ` +
		`WHERE c.oid = ` + RegClass(table)}
}

// convertible is what ATTACH wants to know of the old table, and that the ids are of the kind.
func (p Partitioned) convertible(bound string) string {
	return `"message_id" ~ ` + Literal(pattern(p.IDs)) + ` AND "message_id" < ` + Literal(bound)
}

// CountInconvertible selects the number of records whose ids are of another kind, or not below the bound.
func (p Partitioned) CountInconvertible(table Table, bound string) Query {
	return Query{Text: `SELECT count(*) FROM ` + table.Quoted() + ` WHERE NOT (` + p.convertible(bound) + `)`}
}

// AddCheck, ValidateCheck and DropCheck are the CHECK's life.
func (p Partitioned) AddCheck(table Table, bound string) Query {
	return Query{Text: `ALTER TABLE ` + table.Quoted() + ` ADD CONSTRAINT ` + Identifier(conversionCheck+bound) + ` CHECK (` + p.convertible(bound) + `) NOT VALID`}
}

// ValidateCheck reads the whole table.
func (Partitioned) ValidateCheck(table Table, bound string) Query {
	return Query{Text: `ALTER TABLE ` + table.Quoted() + ` VALIDATE CONSTRAINT ` + Identifier(conversionCheck+bound)}
}

// DropCheck drops it.
func (Partitioned) DropCheck(table Table, bound string) Query {
	return Query{Text: `ALTER TABLE ` + table.Quoted() + ` DROP CONSTRAINT ` + Identifier(conversionCheck+bound)}
}

// RenameIndexes selects the statements that make room for the indexes of a table's successor.
func (Partitioned) RenameIndexes(table Table) Query {
	return Query{Text: `SELECT format('ALTER INDEX %s RENAME TO %I', i.indexrelid::regclass, left(c.relname, 59) || '_old') ` +
		`FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid WHERE i.indrelid = ` + RegClass(table)}
}

// Replace renames a plain table and makes a partitioned one in its place.
func (Partitioned) Replace(table, old Table) []Query {
	return []Query{
		{Text: `ALTER TABLE ` + table.Quoted() + ` RENAME TO ` + Identifier(old.Name())},
		{Text: `CREATE TABLE ` + table.Quoted() + ` (LIKE ` + old.Quoted() + ` INCLUDING ALL) PARTITION BY RANGE ("message_id")`},
	}
}
