package model

import (
	"fmt"
	"strings"
)

// Property is what must hold, in every state or in every final one.
type Property struct {
	Name   string
	Always bool
	Holds  func(State) bool
}

// The properties that the library promises.
var (
	EffectOnce       = Property{"the effect happens exactly once", false, func(s State) bool { return s.Effects == 1 }}
	ClaimIffEffect   = Property{"there is a record exactly if there is an effect", false, func(s State) bool { return s.Claim == (s.Effects > 0) }}
	MessagePublished = Property{"the produced message is published", false, func(s State) bool { return s.Published != 0 }}
	OneUUID          = Property{"the produced message has one UUID", false, func(s State) bool { return !s.OtherUUID }}
	AckedAfterCommit = Property{"nothing is acknowledged before the commit", true, func(s State) bool { return !s.AckedEarly }}
)

// Properties are all of them.
var Properties = []Property{EffectOnce, ClaimIffEffect, MessagePublished, OneUUID, AckedAfterCommit}

// Report is what an exploration has found.
type Report struct {
	States int
	Final  int
	Taken  map[string]int    // how often each step was taken
	Broken map[string]string // the shortest way to break a property, by the property's name
	Stuck  string            // the way to a state that is not final and has no next; empty: there is none
}

// origin is how a state was reached first.
type origin struct {
	from    State
	text    string
	process int
}

// Explore takes every step in every state that can be reached, breadth first, so that the ways it reports are
// the shortest.
func Explore(d Design, start State) Report {
	report := Report{Taken: map[string]int{}, Broken: map[string]string{}}
	seen := map[State]origin{start: {}}
	for queue := []State{start}; len(queue) > 0; queue = queue[1:] {
		s := queue[0]
		report.States++
		if s.Final() {
			report.Final++
		}
		for _, property := range Properties {
			if (property.Always || s.Final()) && !property.Holds(s) && report.Broken[property.Name] == "" {
				report.Broken[property.Name] = way(seen, start, s)
			}
		}
		leads := false
		for _, step := range steps {
			for p := range s.Processes {
				for _, next := range step.take(d, s, p) {
					leads = true
					report.Taken[step.name]++
					if _, before := seen[next.State]; !before {
						seen[next.State] = origin{s, next.Text, p}
						queue = append(queue, next.State)
					}
				}
			}
		}
		if !leads && !s.Final() && report.Stuck == "" {
			report.Stuck = way(seen, start, s)
		}
	}
	return report
}

// way writes how a state was reached, a line per step.
func way(seen map[State]origin, start, s State) string {
	var lines []string
	end := s.String()
	for s != start {
		o := seen[s]
		line := o.text
		if !strings.HasPrefix(line, anybody) {
			line = string(rune('A'+o.process)) + " " + line
		}
		lines = append(lines, line)
		s = o.from
	}
	var b strings.Builder
	for i := range lines {
		fmt.Fprintf(&b, "%3d. %s\n", i+1, lines[len(lines)-1-i])
	}
	return b.String() + "     = " + end
}

// String tells what somebody finds who looks at the broker and the database.
func (s State) String() string {
	return fmt.Sprintf("in the queue: %d, effects: %d, record: %t, stored and not marked: %t, published: %t",
		s.Queue, s.Effects, s.Claim, s.Stored != 0, s.Published != 0)
}
