package inboxsql

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/lib/pq"

	inbox "github.com/devmappa/watermill-inbox"
)

// ErrNoPartition: no partition of a partitioned inbox takes the message's id, and the id is not below the
// window that the partitions cover. A partition is missing, because nobody runs [Partitions], or the clock
// that made the id is ahead. Transient: the message stays with the broker until the partition is there.
var ErrNoPartition = errors.New("no partition for the message id: partition missing or clock skew")

// PartitionedPostgreSQLSchema is the [SchemaAdapter] for a table of PostgreSQL 14 and later that is partitioned
// by the time in its message ids. Old records go by dropping a partition, which costs the same for any number
// of them; see [Partitions], which must run somewhere.
//
// Only ids of the given kind are taken, in their canonical spelling; any other is a permanent error that
// matches inbox.ErrInvalidKey, before SQL is sent. A message older than the oldest partition is a permanent
// error that matches inbox.ErrTooOld: it is not known whether it was processed. One that finds no partition
// otherwise is a transient error that matches [ErrNoPartition].
type PartitionedPostgreSQLSchema struct {
	DefaultPostgreSQLSchema

	// IDs is the kind of the message ids. It must be the kind that the table's partitions have.
	// Required.
	IDs IDKind
}

var (
	_ SchemaAdapter  = PartitionedPostgreSQLSchema{}
	_ KeyChecker     = PartitionedPostgreSQLSchema{}
	_ ClaimExplainer = PartitionedPostgreSQLSchema{}
)

// CheckKey implements [KeyChecker].
func (s PartitionedPostgreSQLSchema) CheckKey(key inbox.Key) error {
	if !s.IDs.valid() {
		return nil // CheckQuery says so, and is nothing that is the message's fault
	}
	if _, ok := s.IDs.Time(key.MessageID); !ok {
		return fmt.Errorf("%w: message id %q is not a %s in its canonical spelling", inbox.ErrInvalidKey, key.MessageID, s.IDs)
	}
	return nil
}

// ExplainClaim implements [ClaimExplainer]. It asks the catalog and trusts no clock of a client: when nobody has
// made partitions for a week, a fresh message must not be taken for an old one.
func (s PartitionedPostgreSQLSchema) ExplainClaim(params KeyParams, err error, query func(Query) ([]string, error)) error {
	if sqlState(err) != stateCheckViolation {
		return err
	}
	id := params.Key.MessageID
	at, ok := s.IDs.Time(id)
	if !ok {
		return err
	}
	texts, lookErr := query(s.windowQuery(params.Table))
	if lookErr != nil {
		return fmt.Errorf("%w: the id's time is %s; the partitions cannot be read: %w: %w", ErrNoPartition, utc(at), lookErr, err)
	}
	window, lookErr := s.parseWindow(texts)
	switch {
	case lookErr != nil:
		return fmt.Errorf("%w: the id's time is %s: %w: %w", ErrNoPartition, utc(at), lookErr, err)
	case window.covers(id):
		return err // a constraint of the user's; or the partition has come meanwhile, and a retry finds it
	case window.isBelow(id):
		return fmt.Errorf("%w: the id's time is %s, the partitions hold %s: %w", inbox.ErrTooOld, utc(at), window.text(s.IDs), err)
	}
	return fmt.Errorf("%w: the id's time is %s, the partitions hold %s: %w", ErrNoPartition, utc(at), window.text(s.IDs), err)
}

const stateCheckViolation = "23514" // of a constraint, and of a row for which there is no partition

func utc(at time.Time) string { return at.UTC().Format("2006-01-02T15:04:05.000Z") }

// MarkSentQuery implements [SchemaAdapter]: the ids once more, so that only their partitions are touched.
func (s PartitionedPostgreSQLSchema) MarkSentQuery(params MarkSentParams) Query {
	ids := make([]string, len(params.Records))
	for i, record := range params.Records {
		ids[i] = pq.QuoteLiteral(record.Key.MessageID)
	}
	query := s.DefaultPostgreSQLSchema.MarkSentQuery(params)
	query.Query += ` AND "message_id" IN (` + strings.Join(ids, ", ") + `)`
	return query
}

// SchemaInitializingQueries implements [SchemaAdapter]. It makes no partition; [Partitions] does.
func (PartitionedPostgreSQLSchema) SchemaInitializingQueries(params SchemaInitializingQueriesParams) []Query {
	return postgreSQLSchemaQueries("postgresql_partitioned", params.Table)
}

// CheckQuery implements [SchemaAdapter]: all that a plain table is checked for, the shape of the partitions, and
// that there is one for the present.
func (s PartitionedPostgreSQLSchema) CheckQuery(params CheckParams) Query {
	query := s.shapeQuery(params)
	if s.IDs.valid() {
		query.Query += strings.ReplaceAll(presentCheck, "$present", s.IDs.present())
	}
	return query
}

// shapeQuery asks for what must be right before partitions are made. The bounds declare the kind of the ids in
// the database.
func (s PartitionedPostgreSQLSchema) shapeQuery(params CheckParams) Query {
	query := s.DefaultPostgreSQLSchema.CheckQuery(params)
	if !s.IDs.valid() {
		query.Query += ` UNION ALL SELECT 'the kind of its ids is not set: IDs must be UUIDv7 or ULID'`
		return query
	}
	query.Query += collationCheck + strings.NewReplacer("$kind", s.IDs.String(), "$pattern", pq.QuoteLiteral(s.IDs.pattern())).Replace(shapeCheck)
	return query
}

const shapeCheck = `
UNION ALL
SELECT 'it is not partitioned by RANGE (message_id): let Partitions make it, or convert the plain table with Partitions.Convert'
FROM inbox LEFT JOIN pg_catalog.pg_partitioned_table p ON p.partrelid = inbox.oid
WHERE p.partstrat IS DISTINCT FROM 'r' OR p.partnatts <> 1
	OR p.partattrs[0] IS DISTINCT FROM (SELECT attnum FROM key WHERE attname = 'message_id')
UNION ALL
SELECT 'it has a DEFAULT partition, in which messages that are too old would be new'
FROM inbox JOIN pg_catalog.pg_partitioned_table p ON p.partrelid = inbox.oid WHERE p.partdefid <> 0
UNION ALL
SELECT 'partition ' || c.oid::pg_catalog.regclass || ' is itself partitioned'
FROM inbox JOIN pg_catalog.pg_inherits i ON i.inhparent = inbox.oid JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
WHERE c.relkind <> 'r'
UNION ALL
SELECT 'partition ' || c.oid::pg_catalog.regclass || ' has the bound ' || bound[1] || ', which is not a $kind: the table is for ids of another kind'
FROM inbox JOIN pg_catalog.pg_inherits i ON i.inhparent = inbox.oid JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid,
	pg_catalog.regexp_matches(pg_catalog.pg_get_expr(c.relpartbound, c.oid), '''([^'']*)''', 'g') AS bound
WHERE bound[1] !~ $pattern`

const collationCheck = `
UNION ALL
SELECT 'message_id must be COLLATE "C", or the partitions are not in the order of the ids'
FROM inbox JOIN key ON attname = 'message_id' LEFT JOIN pg_catalog.pg_collation c ON c.oid = attcollation
WHERE c.collname IS NULL OR c.collname NOT IN ('C', 'POSIX')`

const presentCheck = `
UNION ALL
SELECT 'there is no partition for the present: let Partitions run'
FROM inbox
WHERE relkind = 'p' AND NOT EXISTS (
	SELECT FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid,
		pg_catalog.regexp_match(pg_catalog.pg_get_expr(c.relpartbound, c.oid), '^FOR VALUES FROM \((?:''(.*)''|MINVALUE)\) TO \((?:''(.*)''|MAXVALUE)\)$') AS bound,
		(SELECT $present) AS present (id)
	WHERE i.inhparent = inbox.oid AND NOT i.inhdetachpending AND bound IS NOT NULL
		AND (bound[1] IS NULL OR bound[1] COLLATE "C" <= id) AND (bound[2] IS NULL OR id < bound[2] COLLATE "C")
)`
