package inboxsql

import (
	"database/sql/driver"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/lib/pq"

	inbox "github.com/devmappa/watermill-inbox"
)

// DefaultPostgreSQLSchema is the [SchemaAdapter] for PostgreSQL 12 and later. It is made for lib/pq and
// works with pgx's database/sql driver.
//
// Values are sent as quoted literals: with a driver's parameters a statement takes one more round trip
// and a prepared statement, which transaction-mode poolers do not carry.
type DefaultPostgreSQLSchema struct{}

var _ SchemaAdapter = DefaultPostgreSQLSchema{}

// ClaimQuery implements [SchemaAdapter].
func (DefaultPostgreSQLSchema) ClaimQuery(params KeyParams) Query {
	return Query{Query: `INSERT INTO ` + params.Table.Quoted() + ` ("consumer", "message_id") VALUES (` +
		pq.QuoteLiteral(params.Key.Consumer) + `, ` + pq.QuoteLiteral(params.Key.MessageID) +
		`) ON CONFLICT ("consumer", "message_id") DO NOTHING`}
}

// BeginClaimQuery is ClaimQuery for a transaction that begins in the same message to the server, see
// [NewConnector]. There the transaction's time is the message's; on a connection that is already in a
// transaction it is older, and the division fails.
func (DefaultPostgreSQLSchema) BeginClaimQuery(params KeyParams) Query {
	return Query{Query: `INSERT INTO ` + params.Table.Quoted() + ` ("consumer", "message_id") SELECT ` +
		pq.QuoteLiteral(params.Key.Consumer) + `, ` + pq.QuoteLiteral(params.Key.MessageID) +
		` WHERE 1 / (transaction_timestamp() = statement_timestamp())::int = 1 ON CONFLICT ("consumer", "message_id") DO NOTHING`}
}

// RecordQuery implements [SchemaAdapter].
func (DefaultPostgreSQLSchema) RecordQuery(params KeyParams) Query {
	return Query{Query: `SELECT ` + postgreSQLProcessedAt + `, ` +
		`CASE WHEN "dispatched_at" IS NULL THEN "produced" END FROM ` + params.Table.Quoted() + whereKey(params) + notOurOwn}
}

// notOurOwn leaves out what this transaction has written. A trigger that routes rows elsewhere makes the
// claim report no row although there is one now: that is not a duplicate.
const notOurOwn = ` AND xmin::text IS DISTINCT FROM (txid_current_if_assigned() % 4294967296)::text`

// StoreQuery implements [SchemaAdapter].
func (DefaultPostgreSQLSchema) StoreQuery(params StoreParams) Query {
	return Query{Query: `UPDATE ` + params.Table.Quoted() +
		` SET "produced" = decode('` + hex.EncodeToString(params.Produced) + `', 'hex')` + whereKey(params.KeyParams) + ` RETURNING ` + postgreSQLProcessedAt}
}

// MarkOpenQuery implements [SchemaAdapter]. Lib/pq refuses to commit a transaction that has failed or
// ended; pgx's bridge commits what a ROLLBACK sent as text has ended, and others are not known.
func (DefaultPostgreSQLSchema) MarkOpenQuery(params ProofParams) Query {
	if knowsItsTransaction(params.Driver) {
		return Query{}
	}
	return Query{Query: `SAVEPOINT "watermill_inbox_claimed"`}
}

// ProveOpenQuery implements [SchemaAdapter].
func (DefaultPostgreSQLSchema) ProveOpenQuery(params ProofParams) Query {
	if knowsItsTransaction(params.Driver) {
		return Query{}
	}
	return Query{Query: `RELEASE SAVEPOINT "watermill_inbox_claimed"`}
}

func knowsItsTransaction(d driver.Driver) bool {
	switch d.(type) {
	case *pq.Driver, fusedDriver:
		return true
	}
	return false
}

// MarkSentQuery implements [SchemaAdapter].
func (DefaultPostgreSQLSchema) MarkSentQuery(params MarkSentParams) Query {
	// The sub-select locks in the order of the key; an UPDATE alone locks in the order of its plan.
	return Query{Query: fmt.Sprintf(`UPDATE %s SET "dispatched_at" = now(), "produced" = NULL WHERE ("consumer", "message_id") IN (%s)`,
		params.Table.Quoted(), lockRecords(params.Table, params.Records, ` AND record."produced" IS NOT NULL`))}
}

// lockRecords is a sub-select of the keys of records that are still as they were found. Nothing is added to
// processed_at on the other side of the comparison, so that the records are looked up by their keys, not by their ages, of
// which many may be equal.
func lockRecords(table Table, records []inbox.Found, condition string) string {
	literals := make([]string, len(records))
	for i, f := range records {
		literals[i] = `(` + pq.QuoteLiteral(f.Key.Consumer) + `, ` + pq.QuoteLiteral(f.Key.MessageID) + `, ` + postgreSQLTime(f.ProcessedAt) + `)`
	}
	return `SELECT record."consumer", record."message_id" FROM ` + table.Quoted() + ` AS record ` +
		`JOIN (VALUES ` + strings.Join(literals, ", ") + `) AS found ("consumer", "message_id", "processed_at") ` +
		`ON record."consumer" = found."consumer" AND record."message_id" = found."message_id" ` +
		`AND record."processed_at" + interval '0' = found."processed_at"` + condition +
		` ORDER BY record."consumer", record."message_id" FOR UPDATE OF record`
}

// CheckQuery implements [SchemaAdapter].
func (DefaultPostgreSQLSchema) CheckQuery(params CheckParams) Query {
	return Query{Query: strings.ReplaceAll(postgreSQLCheck, "$table", pq.QuoteLiteral(params.Table.Quoted()))}
}

// A lock of the transaction, not of the session, so that poolers work. Without it CREATE TABLE IF NOT
// EXISTS fails in some of the instances that start at once.
const postgreSQLSchemaLock = `SELECT pg_advisory_xact_lock(hashtext('watermill-inbox schema'))`

// SchemaInitializingQueries implements [SchemaAdapter].
func (DefaultPostgreSQLSchema) SchemaInitializingQueries(params SchemaInitializingQueriesParams) []Query {
	return postgreSQLSchemaQueries("postgresql", params.Table)
}

func postgreSQLSchemaQueries(files string, table Table) []Query {
	// An index lives in its table's schema and is named without it.
	rename := strings.NewReplacer(
		defaultIndex, `"`+table.Name()+indexSuffix+`"`,
		`"`+defaultTable+`"`, table.Quoted(),
	)
	return append([]Query{{Query: postgreSQLSchemaLock}}, schemaQueries(files, rename)...)
}

// IsBrokenByHandler implements [SchemaAdapter]: the server refused, and not because of its own state.
func (DefaultPostgreSQLSchema) IsBrokenByHandler(err error) bool {
	if errors.Is(err, pq.ErrInFailedTransaction) {
		return true
	}
	// Connection, transaction rollback (serialization, deadlock), resources, object state (locks),
	// operator, system, internal; the idle-in-transaction and transaction timeouts.
	state := sqlState(err)
	return state != "" && !hasAnyPrefix(state, "08", "40", "53", "54", "55", "57", "58", "F0", "XX", "25P03", "25P04")
}

// IsTransactionOver implements [SchemaAdapter]: in a failed transaction, in none, no such savepoint.
func (DefaultPostgreSQLSchema) IsTransactionOver(err error) bool {
	return hasAnyPrefix(sqlState(err), "25P01", "25P02", "3B")
}

// sqlState is the error's SQLSTATE, which lib/pq and pgx tell in the same way; empty when it has none.
func sqlState(err error) string {
	var stateErr interface{ SQLState() string }
	if !errors.As(err, &stateErr) {
		return ""
	}
	return stateErr.SQLState()
}

func hasAnyPrefix(s string, prefixes ...string) bool {
	return slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(s, prefix) })
}

// SchemaQuery implements [SchemaAdapter].
func (DefaultPostgreSQLSchema) SchemaQuery(params CheckParams) Query {
	return Query{Query: `SELECT n.nspname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace ` +
		`WHERE c.oid = pg_catalog.to_regclass(` + pq.QuoteLiteral(params.Table.Quoted()) + `)`}
}

const postgreSQLProcessedAt = `(extract(epoch FROM "processed_at") * 1000000)::bigint`

func whereKey(params KeyParams) string {
	return ` WHERE "consumer" = ` + pq.QuoteLiteral(params.Key.Consumer) +
		` AND "message_id" = ` + pq.QuoteLiteral(params.Key.MessageID)
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
