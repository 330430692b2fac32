package dialect

import (
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"

	inbox "github.com/devmappa/watermill-inbox"
)

// PostgreSQL is the [Dialect] of PostgreSQL 12 and later.
//
// Values are sent as literals: with a driver's parameters a statement takes one more round trip and a prepared
// statement, which transaction-mode poolers do not carry.
type PostgreSQL struct{}

var (
	_ Dialect      = PostgreSQL{}
	_ BeginClaimer = PostgreSQL{}
)

// Claim implements [Dialect].
func (PostgreSQL) Claim(table Table, key inbox.Key) Query {
	return Query{Text: `INSERT INTO ` + table.Quoted() + ` ("consumer", "message_id") VALUES (` +
		Literal(key.Consumer) + `, ` + Literal(key.MessageID) + `) ON CONFLICT ("consumer", "message_id") DO NOTHING`}
}

// BeginClaim implements [BeginClaimer]. In one message with BEGIN the transaction's time is the message's; on a
// connection that is already in a transaction it is older, and the division fails.
func (PostgreSQL) BeginClaim(table Table, key inbox.Key) Query {
	return Query{Text: `INSERT INTO ` + table.Quoted() + ` ("consumer", "message_id") SELECT ` +
		Literal(key.Consumer) + `, ` + Literal(key.MessageID) +
		` WHERE 1 / (transaction_timestamp() = statement_timestamp())::int = 1 ON CONFLICT ("consumer", "message_id") DO NOTHING`}
}

// Savepoint implements [Dialect].
func (PostgreSQL) Savepoint() Query { return Query{Text: `SAVEPOINT "watermill_inbox_claimed"`} }

// ReleaseSavepoint implements [Dialect].
func (PostgreSQL) ReleaseSavepoint() Query {
	return Query{Text: `RELEASE SAVEPOINT "watermill_inbox_claimed"`}
}

// Record implements [Dialect].
func (PostgreSQL) Record(table Table, key inbox.Key) Query {
	return Query{Text: `SELECT ` + postgreSQLProcessedAt + `, ` +
		`CASE WHEN "dispatched_at" IS NULL THEN "produced" END FROM ` + table.Quoted() + whereKey(key) + notOurOwn}
}

// notOurOwn leaves out what this transaction has written. A trigger that routes rows elsewhere makes the
// claim report no row although there is one now: that is not a duplicate.
const notOurOwn = ` AND xmin::text IS DISTINCT FROM (txid_current_if_assigned() % 4294967296)::text`

// Store implements [Dialect].
func (PostgreSQL) Store(table Table, key inbox.Key, produced []byte) Query {
	return Query{Text: `UPDATE ` + table.Quoted() +
		` SET "produced" = decode('` + hex.EncodeToString(produced) + `', 'hex')` + whereKey(key) + ` RETURNING ` + postgreSQLProcessedAt}
}

// MarkSent implements [Dialect].
func (PostgreSQL) MarkSent(table Table, records []inbox.Record) Query {
	// The sub-select locks in the order of the key; an UPDATE alone locks in the order of its plan.
	return Query{Text: fmt.Sprintf(`UPDATE %s SET "dispatched_at" = now(), "produced" = NULL WHERE ("consumer", "message_id") IN (%s)`,
		table.Quoted(), lockRecords(table, records, ` AND record."produced" IS NOT NULL`))}
}

// lockRecords is a sub-select of the keys of records that are still as they were found. Nothing is added to
// processed_at on the other side of the comparison, so that the records are looked up by their keys, not by their ages, of
// which many may be equal.
func lockRecords(table Table, records []inbox.Record, condition string) string {
	literals := make([]string, len(records))
	for i, f := range records {
		literals[i] = `(` + Literal(f.Key.Consumer) + `, ` + Literal(f.Key.MessageID) + `, ` + postgreSQLTime(f.ProcessedAt) + `)`
	}
	return `SELECT record."consumer", record."message_id" FROM ` + table.Quoted() + ` AS record ` +
		`JOIN (VALUES ` + strings.Join(literals, ", ") + `) AS found ("consumer", "message_id", "processed_at") ` +
		`ON record."consumer" = found."consumer" AND record."message_id" = found."message_id" ` +
		`AND record."processed_at" + interval '0' = found."processed_at"` + condition +
		` ORDER BY record."consumer", record."message_id" FOR UPDATE OF record`
}

// Check implements [Dialect].
func (PostgreSQL) Check(table Table) Query {
	return Query{Text: strings.ReplaceAll(postgreSQLCheck, "$table", Literal(table.String()))}
}

// Locate implements [Dialect]. The schemas of the search path that the role may not use are not searched: a table
// there is the service's all the same, and to make another one would run every message again.
func (PostgreSQL) Locate(table Table) Query {
	return Query{Text: `SELECT n.nspname, 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace ` +
		`WHERE c.oid = ` + RegClass(table) + ` UNION ALL ` +
		`SELECT n.nspname, 0 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace ` +
		`WHERE c.relname = ` + Literal(table.Name()) + ` AND NOT pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND n.nspname IN (` +
		`SELECT CASE btrim(name, ' "') WHEN '$user' THEN current_user::text ELSE btrim(name, ' "') END ` +
		`FROM regexp_split_to_table(pg_catalog.current_setting('search_path'), ',') AS name) ORDER BY 2 DESC`}
}

// SchemaLock implements [Dialect]. A lock of the transaction, not of the session, so that poolers work. Without
// it CREATE TABLE IF NOT EXISTS fails in some of the instances that start at once.
func (PostgreSQL) SchemaLock() Query {
	return Query{Text: `SELECT pg_advisory_xact_lock(hashtext('watermill-inbox schema'))`}
}

// Schema implements [Dialect].
func (PostgreSQL) Schema(table Table) []Query { return postgreSQLSchema("postgresql", table) }

func postgreSQLSchema(files string, table Table) []Query {
	// An index lives in its table's schema and is named without it.
	return schemaQueries(files, strings.NewReplacer(
		defaultIndex, Identifier(table.Name()+indexSuffix),
		`"`+defaultTable+`"`, table.Quoted(),
	))
}

// IsBrokenByHandler implements [Dialect]: the server refused, and not because of its own state.
func (PostgreSQL) IsBrokenByHandler(err error) bool {
	// Connection, transaction rollback (serialization, deadlock), resources, object state (locks),
	// operator, system, internal; the idle-in-transaction and transaction timeouts.
	state := SQLState(err)
	return state != "" && !HasAnyPrefix(state, "08", "40", "53", "54", "55", "57", "58", "F0", "XX", "25P03", "25P04")
}

// IsTransactionOver implements [Dialect]: in a failed transaction, in none, no such savepoint.
func (PostgreSQL) IsTransactionOver(err error) bool {
	return HasAnyPrefix(SQLState(err), "25P01", "25P02", "3B")
}

// SQLState is the error's SQLSTATE, which lib/pq and pgx tell in the same way; empty when it has none.
func SQLState(err error) string {
	var stateErr interface{ SQLState() string }
	if !errors.As(err, &stateErr) {
		return ""
	}
	return stateErr.SQLState()
}

// HasAnyPrefix reports whether the text begins with one of the prefixes.
func HasAnyPrefix(s string, prefixes ...string) bool {
	return slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(s, prefix) })
}

// RegClass is the table's place in the catalog, as an expression.
func RegClass(table Table) string {
	return `pg_catalog.to_regclass(` + Literal(table.String()) + `)`
}

const postgreSQLProcessedAt = `(extract(epoch FROM "processed_at") * 1000000)::bigint`

func whereKey(key inbox.Key) string {
	return ` WHERE "consumer" = ` + Literal(key.Consumer) + ` AND "message_id" = ` + Literal(key.MessageID)
}

func interval(microseconds int64) string {
	return fmt.Sprintf(`%d * interval '1 microsecond'`, microseconds)
}

const postgreSQLCheck = `
WITH inbox AS (
	SELECT oid, relkind, relpersistence FROM pg_catalog.pg_class WHERE oid = pg_catalog.to_regclass($table)
), attribute AS (
	SELECT a.* FROM inbox JOIN pg_catalog.pg_attribute a ON a.attrelid = inbox.oid AND a.attnum > 0 AND NOT a.attisdropped
), key AS (
	SELECT * FROM attribute WHERE attname IN ('consumer', 'message_id')
)
SELECT 'the server is read-only: a standby, or default_transaction_read_only is on'
WHERE pg_catalog.current_setting('transaction_read_only') = 'on'
UNION ALL
SELECT name || ' is ' || pg_catalog.current_setting(name) || ', it must be UTF8'
FROM (VALUES ('server_encoding'), ('client_encoding')) AS encoding (name)
WHERE pg_catalog.current_setting(name) NOT IN ('UTF8', 'UNICODE')
UNION ALL
SELECT 'the table does not exist in the search path: apply schema file 001_inbox.sql'
WHERE NOT EXISTS (SELECT FROM inbox)
UNION ALL
SELECT 'it is not a table' FROM inbox WHERE relkind NOT IN ('r', 'p')
UNION ALL
SELECT 'the table is unlogged or temporary: a crash of the server would forget what was processed'
FROM inbox WHERE relpersistence <> 'p' OR EXISTS (
	SELECT FROM pg_catalog.pg_partition_tree(inbox.oid) AS part JOIN pg_catalog.pg_class c ON c.oid = part.relid WHERE c.relpersistence <> 'p'
)
UNION ALL
SELECT 'column ' || name || ' is missing: apply schema file 001_inbox.sql'
FROM inbox, (VALUES ('consumer'), ('message_id'), ('processed_at'), ('produced'), ('dispatched_at')) AS need (name)
WHERE NOT EXISTS (SELECT FROM attribute WHERE attname = name)
UNION ALL
SELECT 'column ' || attname || ' has type ' || pg_catalog.format_type(atttypid, atttypmod) ||
	', it must be text, or varchar with at least 255 characters'
FROM key
WHERE atttypid NOT IN ('pg_catalog.text'::regtype, 'pg_catalog.varchar'::regtype)
	OR atttypid = 'pg_catalog.varchar'::regtype AND atttypmod BETWEEN 0 AND 255 + 3
UNION ALL
SELECT 'column ' || attname || ' has type ' || pg_catalog.format_type(atttypid, atttypmod) || ', it must be ' || type
FROM attribute JOIN (VALUES ('processed_at', 'timestamp with time zone'), ('produced', 'bytea'), ('dispatched_at', 'timestamp with time zone'))
	AS need (name, type) ON name = attname
WHERE pg_catalog.format_type(atttypid, NULL) <> type
UNION ALL
SELECT 'column processed_at must be NOT NULL and have a default'
FROM attribute WHERE attname = 'processed_at' AND NOT (attnotnull AND atthasdef)
UNION ALL
SELECT 'column ' || attname || ' is generated'
FROM attribute WHERE attname IN ('consumer', 'message_id', 'processed_at', 'produced', 'dispatched_at') AND attgenerated <> ''
UNION ALL
SELECT 'column ' || attname || ' has a nondeterministic collation, so different names would meet; use COLLATE "C"'
FROM key JOIN pg_catalog.pg_collation c ON c.oid = attcollation WHERE NOT c.collisdeterministic
UNION ALL
SELECT 'no primary key or unique index on exactly (consumer, message_id) that is valid, immediate, not partial and compares bytes'
FROM inbox
WHERE NOT EXISTS (
	SELECT FROM pg_catalog.pg_index i
	WHERE i.indrelid = inbox.oid
		AND i.indisunique AND i.indisvalid AND i.indisready AND i.indimmediate
		AND i.indpred IS NULL AND i.indexprs IS NULL AND i.indnkeyatts = 2
		AND (SELECT count(DISTINCT key.attname) FROM key WHERE key.attnum = ANY (i.indkey[0:1])) = 2
		AND NOT EXISTS (SELECT FROM pg_catalog.pg_collation c WHERE c.oid = ANY (i.indcollation) AND NOT c.collisdeterministic)
)
UNION ALL
SELECT 'index ' || indexrelid::regclass || ' is unique on less than the key, so it would refuse other messages'
FROM inbox JOIN pg_catalog.pg_index i ON i.indrelid = inbox.oid
WHERE i.indisunique AND (SELECT count(DISTINCT key.attname) FROM key WHERE key.attnum = ANY (i.indkey)) < 2
UNION ALL
SELECT 'the role ' || current_user || ' lacks the privilege ' || privilege
FROM inbox, (VALUES ('INSERT'), ('SELECT'), ('UPDATE')) AS need (privilege)
WHERE NOT pg_catalog.has_any_column_privilege(inbox.oid, privilege)`
