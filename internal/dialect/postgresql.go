package dialect

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
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

// Proof implements [Dialect], by a cursor, which ends with its transaction and which nobody else knows. A savepoint
// would make everything that the handler writes a subtransaction, with a transaction id of its own.
func (PostgreSQL) Proof() (begin, end Query) {
	return Query{Text: `DECLARE "watermill_inbox" CURSOR FOR VALUES (1)`}, Query{Text: `CLOSE "watermill_inbox"`}
}

// Record implements [Dialect].
func (PostgreSQL) Record(table Table, key inbox.Key) Query {
	return Query{Text: `SELECT ` + microseconds(`record."processed_at"`) + `, ` + unsentColumns + ` FROM ` + recordsWithUnsent(table) +
		` WHERE record."consumer" = ` + Literal(key.Consumer) + ` AND record."message_id" = ` + Literal(key.MessageID)}
}

// unsentColumns are what is known of stored messages. Base64 is the same text whatever bytea_output is.
const unsentColumns = `coalesce(unsent."topic", ''), coalesce(encode(unsent."produced", 'base64'), '')`

func recordsWithUnsent(table Table) string {
	return table.Quoted() + ` AS record LEFT JOIN LATERAL (SELECT * ` + unsentOf(table, `record`, `"processed_at"`) + ` OFFSET 0) AS unsent ON true`
}

// unsentOf is the stored messages of a record, for a sub-select. LATERAL, and OFFSET or FOR UPDATE with it, look each one
// up by its key, also when the table has grown and its statistics have not.
func unsentOf(table Table, record, claimedAt string) string {
	return `FROM ` + table.Unsent().Quoted() + ` AS unsent WHERE unsent."consumer" = ` + record + `."consumer" ` +
		`AND unsent."message_id" = ` + record + `."message_id" AND unsent."claimed_at" = ` + record + `.` + claimedAt
}

// DecodeProduced implements [Dialect]. It reads a text as it is, because another copy of it may be large.
func (PostgreSQL) DecodeProduced(value any) ([]byte, error) {
	var (
		encoded io.Reader
		size    int
	)
	switch value := value.(type) {
	case string:
		encoded, size = strings.NewReader(value), len(value)
	case []byte:
		encoded, size = bytes.NewReader(value), len(value)
	}
	if size == 0 {
		return nil, nil
	}
	produced := make([]byte, base64.StdEncoding.DecodedLen(size))
	n, err := io.ReadFull(base64.NewDecoder(base64.StdEncoding, encoded), produced) // which skips line ends
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = nil // there were some, or padding
	}
	return produced[:n], err
}

// Store implements [Dialect]. Through a driver whose parameters cost a round trip the bytes are text.
func (PostgreSQL) Store(table Table, key inbox.Key, params inbox.StoreParams, freeParameters bool) Query {
	query := Query{Args: []any{params.Produced}}
	var text strings.Builder
	before := `INSERT INTO ` + table.Unsent().Quoted() + ` ("consumer", "message_id", "claimed_at", "topic", "produced") ` +
		`SELECT "consumer", "message_id", "processed_at", ` + Literal(params.Topic) + `, `
	after := ` FROM ` + table.Quoted() + whereKey(key) + ` RETURNING ` + microseconds(`"claimed_at"`)
	if freeParameters {
		query.Text = before + `$1` + after
		return query
	}
	query.Args = nil
	text.Grow(len(before) + base64.StdEncoding.EncodedLen(len(params.Produced)) + len(after) + len(`decode('', 'base64')`))
	text.WriteString(before + `decode('`)
	encoder := base64.NewEncoder(base64.StdEncoding, &text)
	_, _ = encoder.Write(params.Produced) // a strings.Builder takes all
	_ = encoder.Close()
	text.WriteString(`', 'base64')` + after)
	query.Text = text.String()
	return query
}

// MarkSent implements [Dialect]. The records are in the order of their keys.
func (PostgreSQL) MarkSent(table Table, records []inbox.Record) Query {
	const key = `"consumer", "message_id", "claimed_at"`
	return Query{Text: `WITH ` + wantedUnsent(table, records, ` SKIP LOCKED`) + `, ` +
		`deleted AS (DELETE FROM ` + table.Unsent().Quoted() + ` AS unsent WHERE unsent.ctid = ANY (ARRAY(SELECT place FROM mine)) RETURNING ` + key + `) ` +
		`SELECT "consumer", "message_id", ` + microseconds(`"claimed_at"`) + ` FROM wanted ` +
		`CROSS JOIN LATERAL (SELECT 1 ` + unsentOf(table, `wanted`, `"claimed_at"`) + ` OFFSET 0) AS there ` +
		`LEFT JOIN deleted USING (` + key + `) WHERE deleted."consumer" IS NULL`}
}

// wantedUnsent are the parts "wanted" and "mine" of a query: the records, and the locked places of their stored messages.
func wantedUnsent(table Table, records []inbox.Record, locked string) string {
	return `wanted ("consumer", "message_id", "claimed_at") AS (VALUES ` + recordLiterals(records) + `), ` +
		`mine AS MATERIALIZED (SELECT place FROM wanted CROSS JOIN LATERAL (SELECT unsent.ctid AS place ` +
		unsentOf(table, `wanted`, `"claimed_at"`) + ` FOR UPDATE` + locked + `) AS found)`
}

func recordLiterals(records []inbox.Record) string {
	literals := make([]string, len(records))
	for i, record := range records {
		literals[i] = `(` + Literal(record.Key.Consumer) + `, ` + Literal(record.Key.MessageID) + `, ` + postgreSQLTime(record.ProcessedAt) + `)`
	}
	return strings.Join(literals, ", ")
}

// Check implements [Dialect].
func (PostgreSQL) Check(table Table) Query {
	return Query{Text: strings.NewReplacer("$table", Literal(table.String()), "$unsent", Literal(table.Unsent().String())).Replace(postgreSQLCheck)}
}

// noIndex is the advice.
const noIndex = `no index begins with (consumer, processed_at), so each batch reads the whole table: apply the CREATE INDEX of schema file 001_inbox.sql, CONCURRENTLY on a table in use`

// Advice implements [Dialect].
func (PostgreSQL) Advice(table Table) Query {
	column := func(i int) string {
		return fmt.Sprintf(`(SELECT attname FROM pg_catalog.pg_attribute WHERE attrelid = i.indrelid AND attnum = i.indkey[%d])`, i)
	}
	return Query{Text: `SELECT ` + Literal(noIndex) + ` FROM pg_catalog.pg_class c WHERE c.oid = ` + RegClass(table) + ` AND NOT EXISTS (` +
		`SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid AND i.indisvalid AND i.indpred IS NULL ` +
		`AND ` + column(0) + ` = 'consumer' AND ` + column(1) + ` = 'processed_at')`}
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
		`"`+defaultTable+unsentSuffix+`"`, table.Unsent().Quoted(),
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

// IsDenied implements [Dialect].
func (PostgreSQL) IsDenied(err error) bool { return SQLState(err) == "42501" }

// IsTransactionOver implements [Dialect]: in a failed transaction, in none, no such cursor.
func (PostgreSQL) IsTransactionOver(err error) bool {
	return HasAnyPrefix(SQLState(err), "25P01", "25P02", "34")
}

// IsTransactionFailed implements [Dialect].
func (PostgreSQL) IsTransactionFailed(err error) bool { return SQLState(err) == "25P02" }

// IsTimeout implements [Dialect]: query canceled, lock not available.
func (PostgreSQL) IsTimeout(err error) bool { return HasAnyPrefix(SQLState(err), "57014", "55P03") }

// ReadOnly is what Check finds last, of the server or of the session.
const ReadOnly = "the server is read-only: a standby, or default_transaction_read_only is on"

// ErrReadOnly stands for ReadOnly where an error is needed.
var ErrReadOnly = errors.New(ReadOnly)

// CannotWrite reports whether an error of a statement of ours says that its session cannot write, and never will: of a
// server that was a standby for a moment, or of a role that was read-only. Who meets one closes the connection. BEGIN
// READ WRITE on a standby is "not supported", as nothing else of ours is.
func CannotWrite(err error) bool {
	return err != nil && (errors.Is(err, ErrReadOnly) || HasAnyPrefix(SQLState(err), "25006", "0A000"))
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

// microseconds is a time as microseconds since 1970.
func microseconds(time string) string { return `(extract(epoch FROM ` + time + `) * 1000000)::bigint` }

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
SELECT name || ' is ' || pg_catalog.current_setting(name) || ', it must be UTF8'
FROM (VALUES ('server_encoding'), ('client_encoding')) AS encoding (name)
WHERE pg_catalog.current_setting(name) NOT IN ('UTF8', 'UNICODE')
UNION ALL
SELECT 'the table does not exist in the search path: apply schema file 001_inbox.sql'
WHERE NOT EXISTS (SELECT FROM inbox)
UNION ALL
SELECT 'it is not a table' FROM inbox WHERE relkind NOT IN ('r', 'p')
UNION ALL
SELECT 'row level security is active for the role on ' || name || ': it may hide records, and nothing would say so'
FROM (VALUES ('the table', $table), ('the table of unsent messages', $unsent)) AS t (name, quoted)
WHERE pg_catalog.to_regclass(quoted) IS NOT NULL AND pg_catalog.row_security_active(pg_catalog.to_regclass(quoted)::oid)
UNION ALL
SELECT 'the table is unlogged or temporary: a crash of the server would forget what was processed'
FROM inbox WHERE relpersistence <> 'p' OR EXISTS (
	SELECT FROM pg_catalog.pg_partition_tree(inbox.oid) AS part JOIN pg_catalog.pg_class c ON c.oid = part.relid WHERE c.relpersistence <> 'p'
)
UNION ALL
SELECT 'column ' || name || ' is missing: apply schema file 001_inbox.sql'
FROM inbox, (VALUES ('consumer'), ('message_id'), ('processed_at')) AS need (name)
WHERE NOT EXISTS (SELECT FROM attribute WHERE attname = name)
UNION ALL
SELECT 'column ' || attname || ' has type ' || pg_catalog.format_type(atttypid, atttypmod) ||
	', it must be text, or varchar with at least 255 characters'
FROM key
WHERE atttypid NOT IN ('pg_catalog.text'::regtype, 'pg_catalog.varchar'::regtype)
	OR atttypid = 'pg_catalog.varchar'::regtype AND atttypmod BETWEEN 0 AND 255 + 3
UNION ALL
SELECT 'column processed_at has type ' || pg_catalog.format_type(atttypid, atttypmod) || ', it must be timestamp with time zone'
FROM attribute WHERE attname = 'processed_at' AND pg_catalog.format_type(atttypid, NULL) <> 'timestamp with time zone'
UNION ALL
SELECT 'column processed_at must be NOT NULL and have a default'
FROM attribute WHERE attname = 'processed_at' AND NOT (attnotnull AND atthasdef)
UNION ALL
SELECT 'column ' || attname || ' is generated'
FROM attribute WHERE attname IN ('consumer', 'message_id', 'processed_at') AND attgenerated <> ''
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
FROM inbox, (VALUES ('INSERT'), ('SELECT')) AS need (privilege)
WHERE NOT pg_catalog.has_any_column_privilege(inbox.oid, privilege)
UNION ALL
SELECT 'the table has the trigger ' || tgname || ', which could let a claim take no effect'
FROM inbox JOIN LATERAL (SELECT relid::oid FROM pg_catalog.pg_partition_tree(inbox.oid) UNION SELECT inbox.oid) AS part ON true
	JOIN pg_catalog.pg_trigger t ON t.tgrelid = part.relid
WHERE NOT tgisinternal AND tgenabled <> 'D' AND tgtype & 4 <> 0
UNION ALL
SELECT 'the table has the rule ' || rulename || ', which could let a claim take no effect'
FROM inbox JOIN pg_catalog.pg_rewrite ON ev_class = inbox.oid
WHERE ev_type = '3' AND ev_enabled <> 'D'
UNION ALL
SELECT 'table ' || inhrelid::pg_catalog.regclass || ' inherits from it: its records are no part of the unique key'
FROM inbox JOIN pg_catalog.pg_inherits ON inhparent = inbox.oid WHERE relkind = 'r'
UNION ALL
SELECT 'the table of unsent messages does not exist: apply schema file 001_inbox.sql'
FROM inbox WHERE pg_catalog.to_regclass($unsent) IS NULL
UNION ALL
SELECT 'the table of unsent messages is unlogged or temporary: a crash of the server would forget them'
FROM pg_catalog.pg_class WHERE oid = pg_catalog.to_regclass($unsent) AND relpersistence <> 'p'
UNION ALL
SELECT 'column ' || need.name || ' of the table of unsent messages is missing or has another type than ' || need.type || ': apply schema file 001_inbox.sql'
FROM (VALUES ('consumer', 'text'), ('message_id', 'text'), ('claimed_at', 'timestamp with time zone'), ('stored_at', 'timestamp with time zone'),
	('leased_until', 'timestamp with time zone'), ('topic', 'text'), ('produced', 'bytea')) AS need (name, type)
WHERE pg_catalog.to_regclass($unsent) IS NOT NULL AND NOT EXISTS (
	SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = pg_catalog.to_regclass($unsent) AND a.attnum > 0 AND NOT a.attisdropped
		AND a.attname = need.name AND (pg_catalog.format_type(a.atttypid, NULL) = need.type OR need.type = 'text' AND a.atttypid = 'pg_catalog.varchar'::regtype)
)
UNION ALL
SELECT 'the table of unsent messages has no primary key on (consumer, message_id, claimed_at)'
FROM inbox WHERE pg_catalog.to_regclass($unsent) IS NOT NULL AND NOT EXISTS (
	SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = pg_catalog.to_regclass($unsent)
		AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL AND i.indnkeyatts = 3
		AND (SELECT count(DISTINCT a.attname) FROM pg_catalog.pg_attribute a
			WHERE a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey[0:2]) AND a.attname IN ('consumer', 'message_id', 'claimed_at')) = 3
)
UNION ALL
SELECT 'the role ' || current_user || ' lacks the privilege ' || privilege || ' on the table of unsent messages'
FROM (VALUES ('INSERT'), ('SELECT'), ('UPDATE'), ('DELETE')) AS need (privilege)
WHERE pg_catalog.to_regclass($unsent) IS NOT NULL
	AND NOT pg_catalog.has_table_privilege(pg_catalog.to_regclass($unsent), privilege)
UNION ALL
SELECT '` + ReadOnly + `'
WHERE pg_catalog.current_setting('transaction_read_only') = 'on'`
